// SPDX-License-Identifier: Apache-2.0
// What an engine has to do in one step of an iteration_batch (iteration_batch.hpp), and the concept that it models.
//
//   struct engine {
//       void step(const gpushare::step_plan& plan, std::span<gpushare::text_token> next) {
//           for (const auto& m : plan.moves) carry_out(m);                      // in this order, before anything is computed
//           for (const auto& e : plan.entries) compute(e);                      // e.tokens, from e.begin on, by the pages e.pages
//           for (std::size_t i = 0; i < next.size(); ++i) next[i] = sampled(i); // for each entry; read where `samples` is set
//       }
//   };
#pragma once

#include <cstdint>
#include <span>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A token of a text, as the engine numbers them.
using text_token = std::uint32_t;
/// Names one request of an iteration_batch. Never used twice; 0 is none.
using text_id = std::uint64_t;

/// Where a page's content goes before a step computes.
enum class page_move_kind : std::uint8_t {
    copy,       ///< from a page of the device to another one
    to_host,    ///< from a page of the device to a page of the host
    to_device,  ///< from a page of the host to a page of the device
};

/// One page's content to be moved. `from` still holds its content when the moves before this one are done.
struct page_move {
    page_move_kind kind = page_move_kind::copy;  ///< which way
    std::uint32_t from = 0;                      ///< number of the page that is read
    std::uint32_t to = 0;                        ///< number of the page that is overwritten

    friend constexpr bool operator==(const page_move&, const page_move&) = default;
};

/// One request's part of a step.
struct step_entry {
    text_id id = 0;                            ///< whose tokens these are
    std::uint32_t tenant = 0;                  ///< of the request
    std::uint32_t begin = 0;                   ///< position of the first of them in the text
    std::span<const text_token> tokens{};      ///< to be computed: their keys and values go into the pages
    std::span<const std::uint32_t> pages{};    ///< of the whole text so far: position p is in pages[p / page_tokens]
    bool samples = false;                      ///< the last of them is the text's last: the engine returns the next one
};

/// One step: moves first, in their order, then the entries, in any order. Spans last until the step is completed.
struct step_plan {
    std::span<const page_move> moves{};      ///< the order counts: a page may be freed by one and filled by the next
    std::span<const step_entry> entries{};   ///< one for each request that takes part
    std::uint32_t tokens = 0;                ///< of all entries; at most iteration_options::step_tokens
};

/// An engine that computes steps. step() writes the next token of entry i to next[i], as many as entries, and returns
/// when all of it is done, or throws. Positions before an entry's `begin` are read from its pages and not written.
template <class E>
concept iteration_engine = requires(E& e, const step_plan& plan, std::span<text_token> next) { e.step(plan, next); };

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
