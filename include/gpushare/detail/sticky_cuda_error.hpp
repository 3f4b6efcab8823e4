// SPDX-License-Identifier: Apache-2.0
// The errors of CUDA that stay: the one list of them, for all headers that translate errors. The
// codes are numbers, which are the same in the runtime and in the driver, so that this header needs
// no header of CUDA.
//
//   if (detail::is_sticky_cuda_error(cudaErrorAssert)) ...  // the process loses the device
#pragma once

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// See cuda::is_sticky. (Runtime API, cudaError: the text "leaves the process in an inconsistent
/// state" marks these codes.)
[[nodiscard]] constexpr bool is_sticky_cuda_error(int code) noexcept {
    switch (code) {
        case 214:               // cudaErrorECCUncorrectable
        case 220:               // cudaErrorNvlinkUncorrectable
        case 226:               // cudaErrorContained
        case 700:               // cudaErrorIllegalAddress
        case 702:               // cudaErrorLaunchTimeout
        case 710:               // cudaErrorAssert
        case 714:               // cudaErrorHardwareStackError
        case 715:               // cudaErrorIllegalInstruction
        case 716:               // cudaErrorMisalignedAddress
        case 717:               // cudaErrorInvalidAddressSpace
        case 718:               // cudaErrorInvalidPc
        case 719:               // cudaErrorLaunchFailure
        case 721:               // cudaErrorTensorMemoryLeak
        case 810:               // cudaErrorMpsClientTerminated
        case 911: return true;  // cudaErrorExternalDevice
        default: return false;
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
