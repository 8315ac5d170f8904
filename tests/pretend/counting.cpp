// What the pretend device counts: launches, waits of the host, allocations; in every count that is open.
#include "device.h"

namespace pretend {
namespace {

std::recursive_mutex count_lock;

struct Counts {
  std::map<std::string, std::map<std::string, int64_t>> by_kind;
  int64_t peak = 0;
};
std::map<int64_t, Counts> open_counts;
std::vector<std::string> open_scopes;
int64_t next_count = 0, live_now = 0;
std::string waits_are = "default";  // "warn", "error": as torch.cuda.set_sync_debug_mode

std::string as_json(const Counts& counts) {
  std::string text = "{\"peak_bytes\": " + std::to_string(counts.peak);
  for (auto& [kind, names] : counts.by_kind) {
    text += ", \"" + kind + "\": {";
    bool first = true;
    for (auto& [name, times] : names) {
      text += (first ? "\"" : ", \"") + name + "\": " + std::to_string(times);
      first = false;
    }
    text += "}";
  }
  return text + "}";
}

}  // namespace

void count(const std::string& kind, const std::string& name, int64_t by) {
  std::lock_guard<std::recursive_mutex> held(count_lock);
  for (auto& [_, counts] : open_counts) counts.by_kind[kind][name] += by;
}

void note_live(int64_t live) {
  std::lock_guard<std::recursive_mutex> held(count_lock);
  live_now = live;
  for (auto& [_, counts] : open_counts) counts.peak = std::max(counts.peak, live);
}

void synchronize(const std::string& why) {
  if (is_recording()) refuse_in_recording(why);
  count("synchronizations", why);
  TORCH_CHECK(waits_are != "error", "called a synchronizing CUDA operation: ", why);
  if (waits_are == "warn") TORCH_WARN("called a synchronizing CUDA operation: ", why);
}

std::string scopes() {
  std::lock_guard<std::recursive_mutex> held(count_lock);
  std::string text;
  for (auto& one : open_scopes) text += (text.empty() ? "" : "/") + one;
  return text;
}

bool is_in_scope(const std::string& name) {
  std::lock_guard<std::recursive_mutex> held(count_lock);
  return std::find(open_scopes.begin(), open_scopes.end(), name) != open_scopes.end();
}

TORCH_LIBRARY(pretend_gpu, m) {
  m.def("open_count() -> int", [] {
    std::lock_guard<std::recursive_mutex> held(count_lock);
    open_counts[++next_count].peak = live_now;
    return next_count;
  });
  m.def("read_count(int number) -> str", [](int64_t number) {
    std::lock_guard<std::recursive_mutex> held(count_lock);
    return as_json(open_counts.at(number));
  });
  m.def("close_count(int number) -> ()", [](int64_t number) {
    std::lock_guard<std::recursive_mutex> held(count_lock);
    open_counts.erase(number);
  });
  m.def("enter_scope(str name) -> ()", [](std::string name) {
    std::lock_guard<std::recursive_mutex> held(count_lock);
    open_scopes.push_back(name);
  });
  m.def("leave_scope() -> ()", [] {
    std::lock_guard<std::recursive_mutex> held(count_lock);
    open_scopes.pop_back();
  });
  m.def("synchronize(str why) -> ()", [](std::string why) { synchronize(why); });
  m.def("set_waits(str mode) -> ()", [](std::string mode) { waits_are = mode; });
}

}  // namespace pretend
