// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// An engine on ggml, with its own library if it has been fetched: its buffers in a tenant's arena,
// and a permit for each token.
#ifdef GPUSHARE_GGML

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "interop/ggml_buffers.hpp"
#include "interop/two_tenants.hpp"

namespace ggml_test {
namespace {

constexpr std::size_t MiB = two_tenants::MiB;

/// The smallest language model: a token is a number below `words`, and the next one is where its
/// row of the weights is largest.
class model {
public:
    static constexpr std::int64_t words = 256;

    /// Its weights and its scratch memory lie in buffers of that type.
    explicit model(ggml_backend_buffer_type_t buffers)
        : weights_context_(make_context()), graph_context_(make_context()), backend_(ggml_backend_cpu_init()) {
        ggml_backend_cpu_set_n_threads(backend_, 1);
        // docs/recipes.md has some of these lines, and of those below.
        weights_ = ggml_new_tensor_2d(weights_context_, GGML_TYPE_F32, words, words);
        token_ = ggml_new_tensor_1d(weights_context_, GGML_TYPE_F32, words);
        loaded_ = ggml_backend_alloc_ctx_tensors_from_buft(weights_context_, buffers);  // 1
        scratch_ = ggml_gallocr_new(buffers);                                           // 2
        if (loaded_ == nullptr) return;
        std::vector<float> rows(words * words);  // after n comes 5 n + 3
        for (std::int64_t n = 0; n < words; ++n) rows[std::size_t((5 * n + 3) % words * words + n)] = 1;
        ggml_backend_tensor_set(weights_, rows.data(), 0, rows.size() * sizeof(float));
        graph_ = ggml_new_graph(graph_context_);
        scores_ = ggml_mul_mat(graph_context_, weights_, token_);
        ggml_build_forward_expand(graph_, scores_);
        ready_ = ggml_gallocr_alloc_graph(scratch_, graph_);
    }
    ~model() {
        ggml_gallocr_free(scratch_);
        ggml_backend_buffer_free(loaded_);
        ggml_backend_free(backend_);
        ggml_free(graph_context_);
        ggml_free(weights_context_);
    }
    model(const model&) = delete;
    model& operator=(const model&) = delete;

    [[nodiscard]] bool ready() const { return ready_; }
    [[nodiscard]] std::int64_t after(std::int64_t n) {
        std::array<float, words> one_hot{}, scores{};
        one_hot[std::size_t(n)] = 1;
        ggml_backend_tensor_set(token_, one_hot.data(), 0, sizeof one_hot);
        if (ggml_backend_graph_compute(backend_, graph_) != GGML_STATUS_SUCCESS) return -1;
        ggml_backend_tensor_get(scores_, scores.data(), 0, sizeof scores);
        return std::ranges::max_element(scores) - scores.begin();
    }

private:
    static ggml_context* make_context() {
        return ggml_init(
            {.mem_size = 8 * ggml_tensor_overhead() + ggml_graph_overhead(), .mem_buffer = nullptr, .no_alloc = true});
    }

    ggml_context *weights_context_, *graph_context_;
    ggml_backend_t backend_;
    ggml_tensor *weights_ = nullptr, *token_ = nullptr, *scores_ = nullptr;
    ggml_backend_buffer_t loaded_ = nullptr;
    ggml_gallocr_t scratch_ = nullptr;
    ggml_cgraph* graph_ = nullptr;
    bool ready_ = false;
};

/// A tenant of 8 MiB in an arena, of chunks of 64 KiB.
struct in_arena {
    using tenancy = gpushare::tenancy<gpushare::host::node>;

    gpushare::host::node node{{.memory = gpushare::bytes{64 * MiB}, .sms = 2}};
    gpushare::host::virtual_memory chunks{node.memory({0}), gpushare::bytes{MiB / 16}};
    tenancy shared{node};
    tenancy::tenant chat = [this] {
        shared.offer({0}, chunks);
        return shared.admit({.name = "chat",
                             .memory = gpushare::bytes{8 * MiB},
                             .compute = gpushare::share::of_permille(400),
                             .stack = gpushare::memory_stack::arena});
    }();
};

/// Each token is a submission of the tenant.
void check_tokens(in_arena::tenancy::tenant& chat, model& engine, int tokens) {
    std::int64_t token = 1, wanted = 1;
    for (int i = 0; i < tokens; ++i) {
        auto step = chat.submit([&](auto& stream) {  // 3
            stream.launch({.blocks = 1}, [&](auto&) { token = engine.after(token); });
        });
        step.wait();
        wanted = (5 * wanted + 3) % model::words;
        CHECK(token == wanted);
    }
    CHECK(chat.usage().completed == std::uint64_t(tokens));
    CHECK(chat.usage().device_time > gpushare::ns{});
}

}  // namespace

TEST_CASE("buffers of ggml lie in a tenant's arena, or are refused", "[interop][ggml]") {
    in_arena f;
    ggml_buffers mine{f.chat.memory()};
    {
        model engine{mine.type()};
        REQUIRE(engine.ready());
        CHECK(engine.after(7) == 38);
        CHECK(f.chat.usage().allocations == 2);  // weights and scratch
        CHECK(f.chat.usage().total > gpushare::bytes{model::words * model::words * sizeof(float)});
        CHECK(ggml_backend_buft_alloc_buffer(mine.type(), 9 * MiB) == nullptr);
        CHECK(f.chat.usage().refused == 1);
        CHECK(engine.after(7) == 38);
    }
    CHECK(f.chat.usage().frees == 2);
    CHECK(two_tenants::charged(f.chat.memory()) == 0);

    void* const nearly_all = f.chat.memory().allocate(8 * MiB - MiB / 16);
    CHECK_FALSE(model{mine.type()}.ready());
    f.chat.memory().deallocate(nearly_all, 8 * MiB - MiB / 16);
    CHECK(f.chat.close().leaked_blocks == 0);
}

TEST_CASE("each token of an engine on ggml is a submission", "[interop][ggml]") {
    two_tenants f;
    model engine{ggml_backend_cpu_buffer_type()};
    REQUIRE(engine.ready());
    check_tokens(f.chat, engine, 20);
    CHECK(f.chat.usage().allocations == 0);
    CHECK(f.batch.usage().device_time == gpushare::ns{});
}

TEST_CASE("an engine on ggml uses a tenant's arena and takes the tenant's turns", "[interop][ggml]") {
    in_arena f;
    auto& chat = f.chat;
    ggml_buffers mine{chat.memory()};
    model engine{mine.type()};
    REQUIRE(engine.ready());
    check_tokens(chat, engine, 20);
    CHECK(chat.usage().allocations == 2);
}

}  // namespace ggml_test

#endif
