// Operations of the pretend device: each runs on the CPU, in the memory of the device.
#include "aliases.h"

#include <ATen/core/op_registration/adaption.h>
#include <ATen/native/transformers/attention.h>

#include <set>

namespace pretend {
namespace {

constexpr const char* ON_GPU = "wrapper_CUDA_";

// Numbers of no dimension may lie on the CPU where an operation goes element by element.
bool takes_numbers(const std::string& name) {
  static const std::set<std::string> strict{
      "mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "index_select", "gather", "scatter", "scatter_add",
      "embedding", "embedding_dense_backward", "cat", "index_copy", "index_add", "nll_loss_forward", "_fused_adamw_"};
  return !strict.count(name);
}

// Returns whether an index lies on the CPU, which a GPU copies first.
bool check_devices(const c10::OperatorHandle& op, const Stack& given) {
  const auto& schema = op.schema();
  const std::string base = op.operator_name().name.substr(std::string("aten::").size());
  const bool by_index = base == "index" || base == "index_put" || base == "index_put_" || base == "_index_put_impl_";
  std::optional<c10::Device> common;
  bool copies_index = false;
  for (const auto& value : given)
    for (const auto& one : tensors_of(value))
      if (is_ours(one)) common = one.device();
  for (size_t place = 0; place < given.size(); ++place)
    for (const auto& one : tensors_of(given[place])) {
      if (!one.defined() || is_ours(one)) continue;
      if (by_index && schema.arguments()[place].name() == "indices") {
        copies_index = true;
        continue;
      }
      if (one.dim() == 0 && takes_numbers(base)) continue;
      c10::impl::check_and_update_common_device(
          common, one, (ON_GPU + base).c_str(), schema.arguments()[place].name().c_str());
    }
  return copies_index;
}

// Operations whose results have sizes that only the device knows, or that are numbers of the host.
bool waits(const std::string& name, const Stack& given) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::equal",
      "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::_unique"};
  if (name == "aten::repeat_interleave.Tensor") return given[1].isNone();
  return names.count(name) > 0;
}

bool writes(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite()) return true;
  return false;
}
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(op, stack, true); }

}  // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  Aliases aliases;
  return aliases.of(tensor);
}

void run(const c10::OperatorHandle& op, Stack* stack, bool checks_devices) {
  const auto& schema = op.schema();
  const std::string name = name_of(op);
  const Stack given(stack->end() - static_cast<int64_t>(schema.arguments().size()), stack->end());
  if (checks_devices && check_devices(op, given)) synchronize("an index that lies on the CPU");
  if (waits(name, given)) synchronize(name);
  count_operation(name);
  Aliases aliases;
  Stack results;
  for (const auto& value : given) results.push_back(aliases.of(value));
  const bool records = is_recording();
  if (records) keep_before(op, given);
  run_on_cpu(op, &results);
  aliases.give_back();
  torch::jit::drop(*stack, schema.arguments().size());
  std::vector<std::pair<size_t, at::Tensor>> made;
  size_t place = 0;
  auto wrapped = [&](const at::Tensor& result) {
    bool is_new = false;
    auto tensor = aliases.on_device(result, &is_new);
    if (is_new) made.emplace_back(place, tensor);
    ++place;
    return tensor;
  };
  for (const auto& value : results) {
    if (value.isTensor()) {
      stack->emplace_back(wrapped(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(wrapped(one));
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(value);
    }
  }
  if (made.empty() && !writes(schema)) return;  // a view
  if (name == "aten::resize_" || name == "aten::detach_") return;
  count("launches", name);
  if (records) keep_operation(op, given, std::move(made));
}

namespace {

void copy(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto size = stack->size();
  const at::Tensor to = (*stack)[size - 3].toTensor(), from = (*stack)[size - 2].toTensor();
  const bool is_asynchronous = (*stack)[size - 1].toBool();
  if (is_ours(to) != is_ours(from) && from.numel() > 0) {
    const at::Tensor& host = is_ours(to) ? from : to;
    const bool pinned = is_pinned(host.data_ptr());
    count(is_ours(to) ? "copies_to_device" : "copies_to_host", pinned ? "pinned" : "pageable");
    if (is_recording() && !(pinned && is_asynchronous)) refuse_in_recording("a copy from or to pageable memory");
    if (!is_asynchronous || (!is_ours(to) && !pinned))
      synchronize(is_ours(to) ? "a copy to the device" : "a copy to the host");
  }
  run(op, stack, false);
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::Tensor(at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::Tensor(at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize("aten::_local_scalar_dense");
  return at::_local_scalar_dense(on_cpu(self));
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const int64_t count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto nothing = at::empty({0}, self.options());
  return set_tensor(self, nothing);
}

void record_stream(at::Tensor&, c10::Stream) {}

int64_t attention_choice(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double,
    bool causal, std::optional<double>, bool) {
  const auto type = q.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16, single = type == at::kFloat;
  const bool fits = q.dim() == 4 && k.scalar_type() == type && v.scalar_type() == type && q.size(-1) == k.size(-1) &&
                    q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1 && q.numel() && k.numel();
  auto& context = at::globalContext();
  if (fits && half && !mask && q.size(-1) == v.size(-1) && q.size(-1) <= 256 && (!causal || q.size(2) == k.size(2)) &&
      context.userEnabledFlashSDP())
    return 1;
  const int64_t aligned = half ? 8 : 4;
  if (fits && (half || single) && q.size(1) == k.size(1) && q.size(-1) % aligned == 0 && v.size(-1) % aligned == 0 &&
      (!mask || !mask->defined() || mask->stride(-1) == 1) && context.userEnabledMemEfficientSDP())
    return 2;
  return 0;
}

int64_t fused_choice(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool gqa) {
  return attention_choice(q, k, v, mask, dropout, causal, scale, gqa);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", fused_choice);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice);
  // One kernel for many tensors, where torch without CUDA would take one after the other.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    }
}

}  // namespace pretend
