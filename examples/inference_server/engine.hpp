// SPDX-License-Identifier: Apache-2.0
// A model in the server's view: it states its inputs and outputs, and runs on one block of the
// device. Implement one of these classes to serve an engine of your own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/serving/page_store.hpp>
#include <gpushare/units.hpp>

#include "inference_server/protocol.hpp"
#include "inference_server/server_node.hpp"

namespace inference_server {

/// A text that the model continues. One call at a time.
class generation {
public:
    virtual ~generation() = default;
    /// Computes a part of the prompt, if any is left, and returns whether more is left. The server
    /// calls it before next() until the whole prompt is computed. More urgent work runs between any
    /// two calls, and other tenants' work runs between some of them. An engine that computes the
    /// prompt in generate() or next() needn't override it.
    virtual bool read_on() { return false; }
    /// The next piece of the text; none at the end.
    virtual std::optional<std::string> next() = 0;

protected:
    generation() = default;
    generation(const generation&) = default;
    generation& operator=(const generation&) = default;
};

/// generate() throws this if its tenant's memory has no room for the text's cache now, but will
/// have room later. The text then waits.
struct no_room : std::exception {
    [[nodiscard]] const char* what() const noexcept override { return "no memory for the text's cache"; }
};

/// A loaded model of one tenant. One call at a time. An exception becomes the answer to the call's
/// request, and affects no other request.
class engine {
public:
    engine() = default;
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;
    virtual ~engine() = default;

    /// Called on each of blocks() blocks of the device, which have started together; the first
    /// block fills `outputs`. `inputs` are in the model's order. If the model has batches, each
    /// input has the rows of several requests, one request after another, and each output must have
    /// the same layout. On CUDA, run() is called once, where it enqueues the call: see `place`.
    /// Work of the previous call may still be running then.
    virtual void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on);
    /// Like run(), for an engine that needs `scratch()` bytes while it runs. The bytes have an
    /// alignment of 256 and unspecified contents, because other models of the tenant use them, too.
    virtual void run_in(std::span<std::byte> scratch, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                        place& on);
    [[nodiscard]] virtual std::size_t scratch() const noexcept { return 0; }
    [[nodiscard]] virtual std::uint32_t blocks() const noexcept { return 1; }
    /// The number of submissions in one call. With more than one, other tenants' work can run in
    /// between: the server calls run_piece() for pieces 0, 1, ... of a call, and never run(). The
    /// pieces run on one block, without scratch.
    [[nodiscard]] virtual std::uint32_t pieces() const noexcept { return 1; }
    /// How long a piece takes, if that is known in advance; otherwise 0.
    [[nodiscard]] virtual gpushare::ns piece_takes(std::uint32_t) const noexcept { return {}; }
    /// Runs one piece. All pieces of a call get the same `inputs`, which stay in place; the last
    /// piece fills `outputs`.
    virtual void run_piece(std::uint32_t piece, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                           place& on);
    /// Frees memory that the engine can quickly make again, because the engine hasn't been used for
    /// a while. The call must be quick, since requests wait for it.
    virtual void drop_caches() noexcept {}
    /// For a model that streams: begins a text of at most `most` tokens. Takes the memory of the
    /// text's cache for all tokens, or throws no_room. So a text that has begun never lacks memory,
    /// and a waiting text holds no memory.
    virtual std::unique_ptr<generation> generate(const std::string& prompt, std::size_t most);
};

/// Chunks of the device's memory, which the caches of all tenants use in turn.
using cache_chunks = gpushare::chunk_pool<cache_memory, server_stream>;
/// Pages of one model's KV cache.
using kv_cache = gpushare::page_store<cache_memory, server_stream>;

struct owner;  // lane.hpp: the tenant itself

/// The parts of a tenant that an engine may use. They outlive the engine.
struct surroundings {
    std::pmr::memory_resource& memory;  ///< for weights
    cache_chunks& chunks;               ///< for caches, together with the members below
    gpushare::quota& limit;
    gpushare::tenant_tag tag;
    std::string_view owner;
    /// for an engine that submits work while it is loaded
    inference_server::owner* whose = nullptr;

    /// A cache that is charged to the tenant.
    [[nodiscard]] std::unique_ptr<kv_cache> cache(gpushare::page_options o) const {
        return std::make_unique<kv_cache>(chunks, limit, tag, std::move(o), owner);
    }
    /// NOLINTNEXTLINE(google-explicit-constructor): most engines need only this
    operator std::pmr::memory_resource&() const noexcept { return memory; }
};

/// A model that can be loaded for a tenant. Its weights and caches lie in the tenant's memory, and
/// are charged to the tenant. `beside` states how much the engine allocates elsewhere, which is
/// charged as well.
struct model_source {
    model_info info;
    std::function<std::unique_ptr<engine>(const surroundings& at)> load;
    gpushare::bytes beside{};
    /// The engine allocates outside of `memory`. The growth of the process's memory during a load
    /// is charged.
    bool measured = false;
    gpushare::ns cut_to{};  ///< the longest time of a piece of a call; 0 makes a call one piece
};

/// Says that the server was built without an engine of that name. The text says which engines it
/// has.
struct unknown_engine : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Engines in pure C++, with made-up weights, for tests of the server.
///  - mlp: INPUT [-1, 16] FP32 -> OUTPUT [-1, 4] FP32, with two layers
///  - letters: continues a text letter by letter, with attention to the whole text in a KV cache. A
///    text has at most `longest` letters.
///  - block: INPUT [8, 64] FP32 -> OUTPUT, a transformer's block in two halves, on two blocks,
///    which a fused all-reduce joins
[[nodiscard]] model_source tiny_mlp();
[[nodiscard]] model_source tiny_letters(std::size_t longest = 16384);
[[nodiscard]] model_source tensor_parallel_block();
/// INPUT [-1, 1] FP32 -> OUTPUT with the same values. Computes for `work` of the processor's time,
/// whatever the batch is, and throws for a negative number. For tests and the demonstration.
[[nodiscard]] model_source busy_model(std::string name, gpushare::ns work);

}  // namespace inference_server
