// SPDX-License-Identifier: Apache-2.0
// What an engine has to do in one step of an iteration_batch (iteration_batch.hpp), and the concept
// that it models.
//
//   struct engine {
//       void step(const gpushare::step_plan& plan, std::span<gpushare::text_token> next) {
//           for (const auto& m : plan.moves) carry_out(m);  // in this order
//           for (const auto& e : plan.entries) compute(e);  // e.tokens, from position e.begin on
//           for (std::size_t i = 0; i < next.size(); ++i) next[i] = sampled(i);  // of entry i
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
    copy,       ///< From a page of the device to another one.
    to_host,    ///< From a page of the device to a page of the host.
    to_device,  ///< From a page of the host to a page of the device.
};

/// A page's content to be moved. Page `from` is to be read when the moves before this one are done:
/// a later one may overwrite it.
struct page_move {
    page_move_kind kind = page_move_kind::copy;  ///< Which way.
    std::uint32_t from = 0;                      ///< Number of the page that is read.
    std::uint32_t to = 0;                        ///< Number of the page that is overwritten.

    friend constexpr bool operator==(const page_move&, const page_move&) = default;  ///< All alike.
};

/// One text's part of a step.
struct step_entry {
    text_id id = 0;                          ///< Whose tokens these are.
    std::uint32_t tenant = 0;                ///< The text's tenant.
    std::uint32_t begin = 0;                 ///< Position of the first token in the text.
    std::span<const text_token> tokens{};    ///< Tokens whose keys and values go into the pages.
    std::span<const std::uint32_t> pages{};  ///< Position p is in pages[p / page_tokens].
    bool samples = false;                    ///< They end the text: the engine returns the next.
};

/// One step: moves first, in their order, then the entries, in any order. Spans last until the step
/// is completed.
struct step_plan {
    std::span<const page_move> moves{};     ///< A page that one frees, a later one may fill.
    std::span<const step_entry> entries{};  ///< One for each text in the step.
    std::uint32_t tokens = 0;               ///< Of all entries.
};

/// An engine that computes steps. step() writes the next token of entry i to next[i], as many as
/// entries, and returns when all of it is done, or throws. Positions before an entry's `begin` are
/// read from its pages and not written.
template <class E>
concept iteration_engine = requires(E& e, const step_plan& plan, std::span<text_token> next) {
    e.step(plan, next);
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
