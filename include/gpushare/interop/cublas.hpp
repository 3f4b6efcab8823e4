// SPDX-License-Identifier: Apache-2.0
// Takes the workspace of a cuBLAS handle from a tenant's memory, and so charges it to the tenant's
// quota. cuBLAS's own workspace wouldn't be charged to any tenant.
//
//   gpushare::stream_resource ordered{tenant.memory(), stream};
//   const auto size = gpushare::cublas_workspace_size(9);  // for devices of compute capability 9
//   gpushare::cublas_workspace mine{handle, stream.native_handle(), ordered, size};
//   cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, a, m, b, k, &zero, c, m);
//   mine.restore();  // after a cublasSetStream by others, which drops the workspace
//
// This header is empty if cuBLAS isn't found.
#pragma once

#if __has_include(<cublas_v2.h>)

#include <cublas_v2.h>

#include <cstddef>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The bytes that cuBLAS's documentation recommends for a compute capability's major number. Some
/// routines fail with less than 16 KiB, and are slower with less than the recommended size.
[[nodiscard]] constexpr bytes cublas_workspace_size(int major) noexcept {
    if (major == 12) return 12_MiB;
    return major >= 9 ? 32_MiB : 4_MiB;
}

/// Refers to the handle and the resource, which must outlive the object. Like the handle, the
/// object isn't thread-safe. While it exists, the handle works on one stream, and the resource must
/// free in that stream's order (stream_resource). Two streams at once need two handles: on one
/// handle, both streams would use one workspace.
template <memory_resource Resource>
class cublas_workspace {
public:
    /// Throws what the resource throws, a std::bad_alloc, and operation_error (backend_failed) with
    /// cuBLAS's status.
    cublas_workspace(cublasHandle_t handle, cudaStream_t stream, Resource& from, bytes size)
        : handle_(handle), stream_(stream), block_(from, static_cast<std::size_t>(size.count())) {
        restore();
    }
    cublas_workspace(const cublas_workspace&) = delete;
    cublas_workspace& operator=(const cublas_workspace&) = delete;
    /// Leaves the handle on its stream, with cuBLAS's own workspace.
    ~cublas_workspace() { (void)cublasSetStream(handle_, stream_); }

    /// Sets the stream and the workspace again. Throws operation_error (backend_failed).
    void restore() {
        check(cublasSetStream(handle_, stream_), "cublasSetStream");  // first: drops the workspace
        check(cublasSetWorkspace(handle_, block_.data(), block_.size()), "cublasSetWorkspace");
    }
    [[nodiscard]] bytes size() const noexcept { return bytes{block_.size()}; }

private:
    static void check(cublasStatus_t status, const char* call) {
        if (status == CUBLAS_STATUS_SUCCESS) return;
        detail::message text;
        text.add(call, ": status ", static_cast<std::uint64_t>(status));
        throw operation_error({.code = errc::backend_failed}, {}, text);
    }

    cublasHandle_t handle_;
    cudaStream_t stream_;
    scratch_memory<Resource> block_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
