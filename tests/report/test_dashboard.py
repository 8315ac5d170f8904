"""Does the dashboard answer with what is in the folders now, to those who may ask, without touching the runs?"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import CONFIG, write_step

from oncurve.constants import LOOPBACK
from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.record import RunFolder
from oncurve.report.dashboard import MAX_COMPARED, Server, Site, find_runs, is_loopback, recipe_of, serve

MakeRun = Callable[..., Path]
Asked = tuple[int, str, Any]


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@pytest.fixture
def served() -> Iterator[Callable[..., Callable[..., Asked]]]:
    """Serves some paths in a thread; what comes back asks it: ``ask(path, Header="...")``."""
    started: list[Server] = []

    def start(*paths: Path, token: str | None = None) -> Callable[..., Asked]:
        server = Server(("127.0.0.1", 0), Site(paths), token=token, hosts=LOOPBACK)
        started.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

        def ask(path: str, **headers: str) -> Asked:
            address = f"http://127.0.0.1:{server.server_address[1]}{path}"
            opener = urllib.request.build_opener(NoRedirect)
            try:
                with opener.open(urllib.request.Request(address, headers=headers), timeout=60) as answer:
                    return answer.status, answer.read().decode(), answer.headers
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode(), error.headers

        return ask

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def boot_of(page: str) -> dict[str, Any]:
    return json.loads(page.split('id="boot">')[1].split("</script>")[0])


def test_a_page_is_written_again_when_the_run_has_a_new_step(made_run: MakeRun, served: Any) -> None:
    run = made_run(steps=4)
    ask = served(run)
    assert ask("/")[0] == 303
    assert ask("/")[2]["location"] == "/run/made"
    before = boot_of(ask("/run/made")[1])
    assert ask("/run/made?stamp")[1] == before["live"]["stamp"]
    assert (before["overview"]["steps_done"], before["live"]["home"]) == (4, None)
    with RunFolder(run, resume_step=4) as folder:
        write_step(folder, 5)
        folder.write_status(5, "sample")
    stamp = before["live"]["stamp"]
    while stamp == before["live"]["stamp"]:  # not at once: a page is made again for a tenth of a processor at most
        stamp = ask("/run/made?stamp")[1]
    after = boot_of(ask("/run/made")[1])
    assert after["overview"]["steps_done"] == 5
    assert 5 in after["steps"]


def test_the_list_has_every_run_with_its_test_accuracy(made_run: MakeRun, served: Any, tmp_path: Path) -> None:
    made_run("first")
    ask = served(tmp_path / "runs")
    assert boot_of(ask("/")[1])["kind"] == "runs"
    [first] = json.loads(ask("/runs")[1])["runs"]
    assert (first["name"], first["tested"], first["steps_done"], first["state"]["name"]) == (
        "first",
        0.75,
        8,
        "finished",
    )
    run = made_run("halted", metrics={"reward/error_fraction": 0.3})
    with RunFolder(run, resume_step=8) as folder:
        folder.write_status(8, "stopped")
        folder.log("stopped: grading failed for 20 of 64 completions")
    made_run("broken")
    (tmp_path / "runs" / "broken" / "metrics.jsonl").write_text("not json\n")
    rows = {row["name"]: row for row in json.loads(ask("/runs")[1])["runs"]}
    assert "grading failed for 20 of 64" in rows["halted"]["state"]["reason"]
    assert rows["halted"]["severe"] == 1
    assert "is not a JSON object" in rows["broken"]["problem"]
    (run / "evaluations" / "trained.json").unlink()
    site = Site([tmp_path / "runs"])
    assert {row["name"]: row.get("tested") for row in site.listed()} == {"first": 0.75, "halted": None, "broken": None}


def test_a_row_of_the_list_is_of_one_moment(made_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run("first", steps=4)
    site = Site([tmp_path / "runs"])
    monkeypatch.setattr("oncurve.report.dashboard.MAX_SHARE", 1e-9)  # nothing is read again for a while
    [before] = site.listed()
    with RunFolder(run, resume_step=4) as folder:
        write_step(folder, 5)
        folder.write_status(5, "stopped")
    [after] = site.listed()
    assert after == before


def test_a_broken_file_is_said_and_the_dashboard_goes_on(made_run: MakeRun, served: Any) -> None:
    run = made_run(steps=4)
    ask = served(run)
    good = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(good + b"not json\n")
    status, said, _ = ask("/run/made?stamp")
    assert status == 404
    assert "is not a JSON object" in said
    (run / "metrics.jsonl").write_bytes(good)
    assert ask("/run/made")[0] == 200


def test_runs_are_compared_and_strangers_are_not(made_run: MakeRun, served: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        made_run(name)
    ask = served(tmp_path / "runs")
    page = ask("/compare?run=first&run=second")[1]
    assert [run["name"] for run in boot_of(page)["runs"]] == ["first", "second"]
    for query in ("", "?run=first", "?run=first&run=first", "?run=first&run=../../etc"):
        assert ask(f"/compare{query}")[0] == 404
    for path in ("/run/none", "/run/..%2f..%2fetc", "/etc/passwd", "/run/"):
        assert ask(path)[0] == 404


def test_watching_writes_nothing(made_run: MakeRun, served: Any) -> None:
    run = made_run()
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}
    ask = served(run.parent)
    for path in ("/", "/runs", "/run/made", "/run/made?stamp"):
        assert ask(path)[0] == 200
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")} == before


@pytest.mark.parametrize("host", ["localhost:8420", "127.0.0.1", "[::1]:8420", "LOCALHOST"])
def test_this_machine_is_served(host: str, made_run: MakeRun, served: Any) -> None:
    assert served(made_run().parent)("/runs", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil.example:8420", "[::2]", "[nothing", ""]
)
def test_a_strangers_name_for_this_machine_is_not(host: str, made_run: MakeRun, served: Any) -> None:
    status, said, _ = served(made_run().parent)("/runs", Host=host)
    assert status == 421
    assert "made" not in said


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic right"},
        {"Cookie": "oncurve_token=wrong"},
        {"Cookie": "oncurve_token="},
        {"Cookie": "other=right"},
        {"Cookie": "oncurve_token=\u00e9; ="},
    ],
)
def test_without_the_token_nothing_is_said(headers: dict[str, str], made_run: MakeRun, served: Any) -> None:
    ask = served(made_run().parent, token="right")
    for path in ("/", "/runs", "/run/made", "/run/made?stamp", "/compare", "/?token=wrong", "/?token="):
        status, said, _ = ask(path, **headers)
        assert status == 401
        assert "made" not in said


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer right"}, {"Cookie": "a=b; oncurve_token=right"}])
def test_with_the_token_everything_is(headers: dict[str, str], made_run: MakeRun, served: Any) -> None:
    status, said, answered = served(made_run().parent, token="right")("/runs", Host="other.example", **headers)
    assert (status, answered["x-frame-options"]) == (200, "DENY")
    assert "made" in said


@pytest.mark.parametrize(
    ("path", "leads"), [("/run/a?token=right&x=1", "/run/a"), ("//evil.example/?token=right", "/evil.example/")]
)
def test_a_token_in_the_address_becomes_a_cookie_and_stays_on_this_server(
    path: str, leads: str, made_run: MakeRun, served: Any
) -> None:
    status, _, answered = served(made_run().parent, token="right")(path)
    assert (status, answered["location"]) == (303, leads)
    assert answered["set-cookie"] == "oncurve_token=right; HttpOnly; Path=/; SameSite=strict"


def test_addresses_of_this_machine_are_known() -> None:
    assert is_loopback("127.0.0.5")
    assert is_loopback("::1")
    assert not is_loopback("192.168.0.1")
    assert not is_loopback("::")


def test_others_get_a_token_and_a_warning(made_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Server, "serve_forever", lambda self, **_: None)
    monkeypatch.setattr("os.nice", lambda _: 0)
    serve([made_run()], host="0.0.0.0", port=0, notify=said.append)
    assert len(said[0].split("?token=")[1]) > 20
    assert "nothing is encrypted" in said[1]


def test_a_port_that_is_taken_is_a_message(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="can be served"):
            serve([tmp_path], port=taken.getsockname()[1], notify=lambda text: None)


def test_runs_are_found_by_name_and_inside_folders(tmp_path: Path) -> None:
    for name in ("here/one", "there/one", "there/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "there" / "notes").mkdir()
    found = find_runs([tmp_path / "here" / "one", tmp_path / "there"])
    assert set(found) == {"one", "one-2", "two"}
    assert found["one"] == tmp_path / "here" / "one"
    with pytest.raises(ConfigError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no run named"):
        Site([tmp_path / "there"]).find("../here/one")


def test_a_supervised_run_is_listed_with_its_loss(made_run: MakeRun, served: Any) -> None:
    run = made_run("shown", config={**CONFIG, "sft": {"epochs": 1}}, metrics={"sft/loss": 0.25})
    ask = served(run.parent)
    [entry] = json.loads(ask("/runs")[1])["runs"]
    assert entry["loss"] == 0.25
    assert entry["reward"] is None


def test_runs_of_one_recipe_are_those_that_differ_in_seed_name_and_folder_alone() -> None:
    one = {"model": "m", "run": {"steps": 8, "seed": 0, "name": "a", "folder": "runs"}}
    same = {"run": {"name": "b", "folder": "elsewhere", "seed": 1, "steps": 8}, "model": "m"}
    assert recipe_of(one) == recipe_of(same) != recipe_of({**one, "model": "n"})
    assert recipe_of({}) == ""


def test_more_runs_than_a_page_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"at most {MAX_COMPARED}"):
        Site([tmp_path]).compared(["one"] * (MAX_COMPARED + 1))
