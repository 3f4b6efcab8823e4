// SPDX-License-Identifier: Apache-2.0
// Stands in for libtorch_cuda.so, which depends on a dozen CUDA libraries. The stand-in lets
// programs link, and start without a device. It defines, under the same names, the functions that
// libtorch.cpp calls, and the workspace functions that the server on CUDA calls.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <utility>

namespace at::cuda {
namespace {

[[noreturn]] void none() { throw std::runtime_error("this libtorch_cuda.so is a stand-in"); }

}  // namespace

// Unlike libtorch's class, this class has no data members. Only the linker sees it.
struct CUDAGraph {
    explicit CUDAGraph(bool keep);
    ~CUDAGraph();
    void capture_begin(std::pair<unsigned long long, unsigned long long> pool, cudaStreamCaptureMode mode);
    void capture_end();
    void replay();
};

CUDAGraph::CUDAGraph(bool) { none(); }
CUDAGraph::~CUDAGraph() = default;
void CUDAGraph::capture_begin(std::pair<unsigned long long, unsigned long long>, cudaStreamCaptureMode) { none(); }
void CUDAGraph::capture_end() { none(); }
void CUDAGraph::replay() { none(); }

struct WorkspaceMapWithMutex;
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace() { none(); }
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace() { none(); }

}  // namespace at::cuda
