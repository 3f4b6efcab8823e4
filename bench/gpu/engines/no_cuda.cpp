// SPDX-License-Identifier: Apache-2.0
// Stands in for libtorch_cuda.so, which needs a dozen of CUDA's libraries: to link with, and to
// start without a device. Of its functions it has those that libtorch.cpp calls, by the same names.
// The server on CUDA links it, too, and asks for workspaces.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <utility>

namespace at::cuda {
namespace {

[[noreturn]] void none() { throw std::runtime_error("this libtorch_cuda.so is a stand-in"); }

}  // namespace

// Not libtorch's class, whose members need more than this: nobody but the linker sees it.
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
