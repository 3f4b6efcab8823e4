// SPDX-License-Identifier: Apache-2.0
// One process's member of a Gloo group over the link of tests/support/shaped_link.sh. Does nothing
// if the build found no Gloo.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#ifdef GPUSHARE_BENCH_GLOO
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#endif

namespace bench {

#ifdef GPUSHARE_BENCH_GLOO
class gloo_group {
public:
    gloo_group(unsigned rank, unsigned ranks)
        : store_(std::getenv("GPUSHARE_SHARED")),
          context_(std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank), static_cast<int>(ranks))) {
        gloo::transport::tcp::attr where;
        where.iface = "wire";
        device_ = gloo::transport::tcp::CreateDevice(where);
        context_->connectFullMesh(store_, device_);
    }
    /// Returns null without Gloo.
    [[nodiscard]] static std::unique_ptr<gloo_group> make(unsigned rank, unsigned ranks) {
        return std::make_unique<gloo_group>(rank, ranks);
    }

    /// Reduces in place with Gloo's "ring" or "bcube" algorithm.
    void all_reduce(std::string_view how, float* x, std::size_t n) {
        gloo::AllreduceOptions o(context_);
        o.setAlgorithm(how == "ring" ? gloo::AllreduceOptions::Algorithm::RING
                                     : gloo::AllreduceOptions::Algorithm::BCUBE);
        o.setOutput(x, n);
        o.setReduceFunction(
            [](void* to, const void* a, const void* b, std::size_t count) { gloo::sum<float>(to, a, b, count); });
        gloo::allreduce(o);
    }

private:
    gloo::rendezvous::FileStore store_;
    std::shared_ptr<gloo::rendezvous::Context> context_;
    std::shared_ptr<gloo::transport::Device> device_;
};
#else
class gloo_group {
public:
    [[nodiscard]] static std::unique_ptr<gloo_group> make(unsigned, unsigned) { return nullptr; }
    void all_reduce(std::string_view, float*, std::size_t) {}
};
#endif

}  // namespace bench
