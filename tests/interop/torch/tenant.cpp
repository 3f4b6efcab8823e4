// SPDX-License-Identifier: Apache-2.0
// A libtorch module in a tenant, by libtorch itself: its memory, its forward passes as submissions,
// or both. A program of its own, for `./dev bench adoption`.
//
//   test_torch_tenant memory|compute|both
#include <cstddef>
#include <cstdio>
#include <new>
#include <string_view>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include <torch/torch.h>

namespace {

namespace gs = gpushare;
using namespace gpushare::literals;

using tenant = gs::tenancy<gs::host::node>::tenant;

/// c10's allocator of the host, over the memory of the tenant that is set.
class tenant_allocator final : public c10::Allocator {
public:
    using blocks = gs::sizeless_memory<std::remove_reference_t<decltype(std::declval<tenant&>().memory())>>;

    c10::DataPtr allocate(std::size_t size) const override {
        void* const p = size == 0 ? nullptr : used->allocate(size, 64);  // out of memory is a std::bad_alloc
        return {p, p, raw_deleter(), c10::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return [](void* p) { used->deallocate(p); };
    }

    static inline blocks* used = nullptr;
};

int failed = 0;
void check(bool good, const char* what) {
    failed += !good;
    if (!good) std::printf("failed: %s\n", what);
}

}  // namespace

int main(int count, char** arguments) {
    const std::string_view what = count > 1 ? arguments[1] : "both";
    torch::set_num_threads(1);
    torch::manual_seed(1);
    torch::NoGradGuard only_forward;
    torch::nn::Sequential model(torch::nn::Linear(64, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
    const auto x = torch::rand({32, 64});
    const auto wanted = model->forward(x);

    gs::host::node node{{.memory = 64_MiB, .sms = 2}};
    gs::tenancy shared{node};
    tenant chat = shared.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct});
    tenant_allocator::blocks blocks{chat.memory()};
    static tenant_allocator mine;
    tenant_allocator::used = &blocks;
    c10::Allocator* const before = c10::GetAllocator(c10::kCPU);
    if (what != "compute") c10::SetAllocator(c10::kCPU, &mine);
    {
        torch::Tensor z;
        if (what == "memory") {
            z = model->forward(x);
        } else {
            for (int call = 0; call < 3; ++call) {  // docs/recipes.md has these lines
                auto done = chat.submit([&](auto& stream) {
                    stream.launch({.blocks = 1}, [&](auto&) {
                        const torch::NoGradGuard here_too;  // is of a thread
                        z = model->forward(x);
                    });
                });
                done.wait();
            }
        }
        check(torch::equal(z, wanted), "the same result");
        check((chat.usage().device_time > gs::ns{}) == (what != "memory"), "charged device time");
        check(chat.usage().completed == (what == "memory" ? 0U : 3U), "submissions");
        check((chat.usage().allocations > 0) == (what != "compute"), "its memory");
        if (what != "compute") {
            try {
                (void)torch::empty({16 << 20});
                check(false, "refused over the quota");
            } catch (const std::bad_alloc&) {
            }
        }
    }
    c10::SetAllocator(c10::kCPU, before);
    check(chat.usage().allocations == chat.usage().frees, "all given back");
    check(chat.close().leaked_blocks == 0, "no leak");
    std::printf("%s: %s\n", arguments[count > 1 ? 1 : 0], failed == 0 ? "passed" : "failed");
    return failed == 0 ? 0 : 1;
}
