// Search on pages that are opened from disk. Browsers start no worker from a file, so a hidden frame runs its script.
(() => {
  if (location.protocol !== "file:") return;

  const load = (page, url) =>
    new Promise((done, failed) => {
      const script = page.createElement("script");
      script.onload = done;
      script.onerror = failed;
      script.src = url;
      page.head.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      const page = this.inside.document;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = async (...urls) => {
        for (const each of urls) await load(page, each);
      };
      this.loaded = load(page, url);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
})();
