// A CUDA device guard that does nothing, for torch wheels built without CUDA: fake cuda tensors may then be indexed.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct QuietCudaGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {};
C10_REGISTER_GUARD_IMPL(CUDA, QuietCudaGuard)
} // namespace
