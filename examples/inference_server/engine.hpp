// SPDX-License-Identifier: Apache-2.0
// What a model is to the server: something that is told what it takes and gives, and runs on one
// block of the device. Write one of these to serve an engine of yours.
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

/// A text that is continued. One call at a time.
class generation {
public:
    virtual ~generation() = default;
    /// Computes a part of the prompt, if there is more of it, and says whether there is still more.
    /// The server calls it before next() until there is none. Between two calls more urgent work
    /// goes first, and between some of them others'. An engine that computes the prompt in
    /// generate() or next() leaves it as it is.
    virtual bool read_on() { return false; }
    /// The next piece; none at the end.
    virtual std::optional<std::string> next() = 0;

protected:
    generation() = default;
    generation(const generation&) = default;
    generation& operator=(const generation&) = default;
};

/// generate() throws this if its tenant's memory has no room for the text's cache now, but will
/// have. The text waits.
struct no_room : std::exception {
    [[nodiscard]] const char* what() const noexcept override { return "no memory for the text's cache"; }
};

/// A loaded model of one tenant. One call at a time. An exception is the answer to the request of
/// the call, and to no other request.
class engine {
public:
    engine() = default;
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;
    virtual ~engine() = default;

    /// On each of blocks() blocks of the device, which have started together; `outputs` is filled
    /// by the first of them. `inputs` are in the order of the model's; where it has batches,
    /// several requests' rows behind each other, and so are the outputs. On CUDA once, where it
    /// enqueues the call: see `place`. The work of the last call may go on then.
    virtual void run(std::span<const tensor> inputs, std::vector<tensor>& outputs, place& on);
    /// The same, of an engine that needs `scratch()` bytes while it runs. It gets them from 256
    /// bytes' alignment on, with anything in them: other models of its tenant use them, too.
    virtual void run_in(std::span<std::byte> scratch, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                        place& on);
    [[nodiscard]] virtual std::size_t scratch() const noexcept { return 0; }
    [[nodiscard]] virtual std::uint32_t blocks() const noexcept { return 1; }
    /// How many submissions one call takes. With more than one, other tenants' work gets in
    /// between: the server calls run_piece() for pieces 0, 1, ... of a call, and never run(). On
    /// one block, without scratch.
    [[nodiscard]] virtual std::uint32_t pieces() const noexcept { return 1; }
    /// How long a piece takes as far as anybody knows beforehand; 0: nobody does.
    [[nodiscard]] virtual gpushare::ns piece_takes(std::uint32_t) const noexcept { return {}; }
    /// One piece. `inputs` are those of the call for each of its pieces, and stay where they are;
    /// the last piece fills `outputs`.
    virtual void run_piece(std::uint32_t piece, std::span<const tensor> inputs, std::vector<tensor>& outputs,
                           place& on);
    /// Frees what it can make anew in no time, as it hasn't been used for a while. Quickly:
    /// requests wait meanwhile.
    virtual void drop_caches() noexcept {}
    /// For a model that streams: begins a text of at most `most` tokens. Takes the memory of the
    /// text's cache for all tokens, or throws no_room. So a text that has begun never lacks memory,
    /// and a waiting text holds none.
    virtual std::unique_ptr<generation> generate(const std::string& prompt, std::size_t most);
};

/// Chunks of the device's memory, which the caches of all tenants have in turn.
using cache_chunks = gpushare::chunk_pool<cache_memory, server_stream>;
/// Pages of one model's KV cache.
using kv_cache = gpushare::page_store<cache_memory, server_stream>;

struct owner;  // lane.hpp: the tenant itself

/// The tenant's parts that an engine may use. They outlive the engine.
struct surroundings {
    std::pmr::memory_resource& memory;  ///< for weights
    cache_chunks& chunks;               ///< for caches, with what follows
    gpushare::quota& limit;
    gpushare::tenant_tag tag;
    std::string_view owner;
    /// for an engine that submits something while it is loaded
    inference_server::owner* whose = nullptr;

    /// A cache that is charged to the tenant.
    [[nodiscard]] std::unique_ptr<kv_cache> cache(gpushare::page_options o) const {
        return std::make_unique<kv_cache>(chunks, limit, tag, std::move(o), owner);
    }
    /// NOLINTNEXTLINE(google-explicit-constructor): most engines want nothing else
    operator std::pmr::memory_resource&() const noexcept { return memory; }
};

/// A model that can be loaded for a tenant. Its weights and caches lie in the tenant's memory, and
/// are charged to the tenant. An engine states in `beside` how much it allocates elsewhere, which
/// is charged as well.
struct model_source {
    model_info info;
    std::function<std::unique_ptr<engine>(const surroundings& at)> load;
    gpushare::bytes beside{};
    /// The engine allocates past `memory` as it likes: what the process has more after a load than
    /// before is charged.
    bool measured = false;
    gpushare::ns cut_to{};  ///< no piece of a call is to take longer; 0: a call is one piece
};

/// The server was built without an engine of that name. The text says which ones it has.
struct unknown_engine : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Pure C++, with made-up weights: what the server is tested with.
///   mlp      INPUT [-1, 16] FP32 -> OUTPUT [-1, 4] FP32: two layers
///   letters  continues a text, letter by letter, and looks at all that was said: in a KV cache. A
///            text has at most `longest`
///   block    INPUT [8, 64] FP32 -> OUTPUT: a transformer's block in two halves, on two blocks;
///            what joins them is a fused all-reduce
[[nodiscard]] model_source tiny_mlp();
[[nodiscard]] model_source tiny_letters(std::size_t longest = 16384);
[[nodiscard]] model_source tensor_parallel_block();
/// INPUT [-1, 1] FP32 -> OUTPUT, the same: computes for `work` of the processor's time, whatever
/// the batch, and throws for a negative number. For tests and the demonstration.
[[nodiscard]] model_source busy_model(std::string name, gpushare::ns work);

}  // namespace inference_server
