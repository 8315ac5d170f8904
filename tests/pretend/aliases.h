// Tensors on the CPU in the memory of the pretend device, through which its operations run.
#pragma once
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace pretend {

at::Generator held_generator(const at::Generator& generator);

using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet CPU{c10::DispatchKey::CPU};

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// Tensors on the CPU that lie in the memory of the device's tensors of one call.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& original) {
    if (!is_ours(original)) return original;
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(storage_of(original)), CPU, original.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(original.sizes(), original.strides(), original.storage_offset());
    if (original.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    tensors.emplace_back(made, original);
    return made;
  }

  IValue of(const IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isDevice()) return value.toDevice().is_cuda() ? c10::Device(c10::DeviceType::CPU) : value.toDevice();
    if (value.isGenerator()) return held_generator(value.toGenerator());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(of(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& one : value.toOptionalTensorVector())
        list.push_back(one ? std::optional<at::Tensor>(of(*one)) : std::nullopt);
      return list;
    }
    return value;
  }

  // What an operation resized is resized on the device.
  void give_back() {
    for (auto& [impl, alias] : storages) {
      auto& original = originals.at(impl);
      if (alias.data() == original.data()) continue;
      auto memory = device_allocator()->allocate(alias.nbytes());
      if (alias.nbytes()) std::memcpy(memory.get(), alias.data(), alias.nbytes());
      original.set_data_ptr_noswap(std::move(memory));
      original.set_nbytes(alias.nbytes());
    }
    for (auto& [alias, original] : tensors) {
      auto* impl = original.unsafeGetTensorImpl();
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
          alias.storage_offset() != original.storage_offset())
        impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  // What an operation gave: the tensor it was given, a view of one, or new memory of the device.
  at::Tensor on_device(const at::Tensor& result, bool* is_new) {
    *is_new = false;
    if (!result.defined()) return result;
    for (auto& [alias, original] : tensors)
      if (alias.is_same(result)) return original;
    for (auto& [impl, alias] : storages)
      if (alias.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return view_of(impl, result);
    *is_new = true;
    if (result.is_cuda() || result.layout() != c10::kStrided) return result;
    auto made = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
        result.scalar_type());
    auto* impl = made.unsafeGetTensorImpl();
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (made.storage().nbytes())
      std::memcpy(made.storage().mutable_data(),
                  static_cast<const char*>(result.storage().data()) + result.storage_offset() * result.itemsize(),
                  made.storage().nbytes());
    return at::Tensor(std::move(made));
  }

 private:
  const c10::Storage& storage_of(const at::Tensor& original) {
    auto* impl = original.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found != storages.end()) return found->second;
    c10::Storage made(
        c10::Storage::use_byte_size_t(), original.storage().nbytes(),
        c10::DataPtr(original.storage().mutable_data(), c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(), true);
    originals.emplace(impl, original.storage());
    return storages.emplace(impl, std::move(made)).first->second;
  }

  at::Tensor view_of(c10::StorageImpl* storage, const at::Tensor& like) {
    c10::DispatchKeySet keys;  // those of its base, so that it is a tensor of inference where that is one
    for (auto& [_, original] : tensors)
      if (original.storage().unsafeGetStorageImpl() == storage) keys = original.key_set();
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(originals.at(storage)), keys, like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // alias, original
  std::map<c10::StorageImpl*, c10::Storage> storages;
  std::map<c10::StorageImpl*, c10::Storage> originals;
};

inline std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> found;
  if (value.isOptionalTensorList())
    for (const auto& one : value.toOptionalTensorVector())
      if (one) found.push_back(*one);
  return found;
}

inline std::string name_of(const c10::OperatorHandle& op) {
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

inline void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(CPU, stack);
}

}  // namespace pretend
