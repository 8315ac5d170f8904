// Recordings of the pretend device: operations with the memory that they read and wrote, which are run again.
#include "aliases.h"

namespace pretend {
namespace {

struct Node {
  c10::OperatorHandle op;
  Stack inputs;
  std::vector<std::pair<size_t, at::Tensor>> outputs;  // place among all tensors of the results
  std::vector<std::pair<const void*, int64_t>> reads;
};

struct Recording {
  int64_t pool = -1, stream = 0, operations = 0;
  bool is_broken = false;
  std::vector<Node> nodes;
  std::map<const void*, std::pair<at::Tensor, at::Tensor>> before;  // place -> memory, its content before
};

std::map<int64_t, Recording> recordings;
thread_local int64_t recording_now = 0;
int64_t next_recording = 0, next_pool = 0;

}  // namespace

// While a step is recorded a GPU computes nothing: what lies outside of the pool is put back at the end.
void keep_before(const c10::OperatorHandle& op, const Stack& given) {
  auto& recording = recordings.at(recording_now);
  const auto& arguments = op.schema().arguments();
  for (size_t place = 0; place < given.size(); ++place) {
    if (!arguments[place].alias_info() || !arguments[place].alias_info()->isWrite()) continue;
    for (const auto& one : tensors_of(given[place])) {
      const void* memory = one.defined() ? one.storage().data() : nullptr;
      if (!memory || recording.before.count(memory) || block_at(memory).pool == recording.pool) continue;
      Aliases aliases;
      auto whole = at::empty({0}, one.options().device(c10::kCPU).dtype(at::kByte));
      auto alias = aliases.of(one);
      whole.unsafeGetTensorImpl()->set_storage_keep_dtype(alias.storage());
      whole.unsafeGetTensorImpl()->set_sizes_contiguous(at::IntArrayRef{static_cast<int64_t>(one.storage().nbytes())});
      recording.before.emplace(memory, std::make_pair(whole, whole.clone()));
    }
  }
}

void keep_operation(const c10::OperatorHandle& op, const Stack& given, std::vector<std::pair<size_t, at::Tensor>> made) {
  Aliases aliases;
  Node node{op, {}, {}, {}};
  for (const auto& value : given) {
    const bool is_number = value.isTensor() && value.toTensor().defined() && !is_ours(value.toTensor());
    node.inputs.push_back(is_number && !is_pinned(value.toTensor().data_ptr()) ? IValue(value.toTensor().clone())
                                                                               : aliases.of(value));
    for (const auto& one : tensors_of(value))
      if (is_ours(one) && one.storage().data())
        node.reads.emplace_back(one.storage().data(), block_at(one.storage().data()).id);
  }
  for (auto& [place, tensor] : made) node.outputs.emplace_back(place, aliases.of(tensor));
  recordings.at(recording_now).nodes.push_back(std::move(node));
}

namespace {

void replay(Recording& recording) {
  at::AutoDispatchBelowADInplaceOrView below;
  count("graph_launches", "");
  for (auto& node : recording.nodes) {
    const std::string name = name_of(node.op);
    for (auto& [place, id] : node.reads) {
      const Block block = block_at(place);
      TORCH_CHECK(
          block.id == id, "a recorded ", name, " reads memory that was given back since it was recorded; ",
          "a GPU would read whatever lies there now");
    }
    count("launches_in_graphs", name);
    Stack stack = node.inputs;
    run_on_cpu(node.op, &stack);
    std::vector<at::Tensor> results;
    for (const auto& value : stack)
      for (const auto& one : tensors_of(value)) results.push_back(one);
    for (auto& [place, output] : node.outputs) output.copy_(results.at(place));
  }
}

}  // namespace

bool is_recording() {
  return recording_now != 0 && recordings.at(recording_now).stream == current_stream();
}

int64_t recording_pool() { return is_recording() ? recordings.at(recording_now).pool : -1; }

void refuse_in_recording(const std::string& what) {
  recordings.at(recording_now).is_broken = true;
  TORCH_CHECK(
      false, "CUDA error: operation not permitted when stream is capturing (", what,
      ")\nSearch for `cudaErrorStreamCaptureUnsupported' in the CUDA documentation for more information.");
}

TORCH_LIBRARY_FRAGMENT(pretend_gpu, m) {
  m.def("new_pool() -> int", [] { return ++next_pool; });
  m.def("begin_recording(int pool) -> int", [](int64_t pool) {
    TORCH_CHECK(
        current_stream() != 0,
        "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on "
        "the default stream.)");
    TORCH_CHECK(recording_now == 0, "CUDA error: operation not permitted when stream is capturing");
    open_pool(pool);
    recordings[++next_recording].pool = pool;
    recordings[next_recording].stream = current_stream();
    return recording_now = next_recording;
  });
  m.def("end_recording() -> ()", [] {
    TORCH_CHECK(recording_now != 0, "no recording is being made");
    auto& recording = recordings.at(recording_now);
    recording_now = 0;
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [_, one] : recording.before) one.first.copy_(one.second);
    recording.before.clear();
    forget_recorded(recording.pool);
    TORCH_CHECK(!recording.is_broken, "CUDA error: operation failed due to a previous error during capture");
  });
  m.def("is_recording() -> bool", [] { return is_recording(); });
  m.def("replay(int number) -> ()", [](int64_t number) {
    if (is_recording()) refuse_in_recording("a replay");
    replay(recordings.at(number));
  });
  m.def("forget(int number) -> ()", [](int64_t number) {
    const int64_t pool = recordings.at(number).pool;
    recordings.erase(number);
    close_pool(pool);
  });
}

}  // namespace pretend
