// SPDX-License-Identifier: Apache-2.0
// The inputs and outputs of an iteration_batch (iteration_batch.hpp): options, requests, figures,
// and the plan of a step with the concept that an engine models.
//
//   gpushare::iteration_options o{.page_tokens = 16, .pages = 4096, .step_tokens = 512};
//
// An engine carries out one plan a step:
//
//   struct engine {
//       void step(const gpushare::step_plan& plan, std::span<gpushare::text_token> next) {
//           for (const auto& m : plan.moves) carry_out(m);  // in this order
//           for (const auto& e : plan.entries) compute(e);  // e.tokens, from position e.begin on
//           for (std::size_t i = 0; i < next.size(); ++i) next[i] = sampled(i);  // of entry i
//       }
//   };
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The number of a token, as the engine numbers tokens.
using text_token = std::uint32_t;
/// The name of one request of an iteration_batch. A name is never used twice; 0 names no request.
using text_id = std::uint64_t;

/// Where a page's content goes before a step computes.
enum class page_move_kind : std::uint8_t {
    copy,       ///< From a page of the device to another page of the device.
    to_host,    ///< From a page of the device to a page of the host.
    to_device,  ///< From a page of the host to a page of the device.
};

/// A move of a page's content. Read page `from` after the moves before this one, and before later
/// moves, which may overwrite the page.
struct page_move {
    page_move_kind kind = page_move_kind::copy;  ///< The direction.
    std::uint32_t from = 0;                      ///< Number of the page that is read.
    std::uint32_t to = 0;                        ///< Number of the page that is overwritten.

    /// Whether all members are equal.
    friend constexpr bool operator==(const page_move&, const page_move&) = default;
};

/// One text's part of a step.
struct step_entry {
    text_id id = 0;                          ///< The text of these tokens.
    std::uint32_t tenant = 0;                ///< The text's tenant.
    std::uint32_t begin = 0;                 ///< Position of the first token in the text.
    std::span<const text_token> tokens{};    ///< Tokens whose keys and values go into the pages.
    std::span<const std::uint32_t> pages{};  ///< Position p is in pages[p / page_tokens].
    /// Whether the engine returns the text's next token: the tokens reach the text's end.
    bool samples = false;
};

/// One step: first the moves, in their order, then the entries, in any order. Spans are valid until
/// the step is completed.
struct step_plan {
    /// A later move may fill a page that an earlier move frees.
    std::span<const page_move> moves{};
    std::span<const step_entry> entries{};  ///< One for each text in the step.
    std::uint32_t tokens = 0;               ///< The tokens of all entries.
};

/// An engine that computes steps. step() writes the next token of entry i to next[i], which has one
/// element for each entry. step() returns when all of the work is done, or throws. Positions before
/// an entry's `begin` are read from the entry's pages and not written.
template <class E>
concept iteration_engine = requires(E& e, const step_plan& plan, std::span<text_token> next) {
    e.step(plan, next);
};

/// The fate of a text's pages when the text has to yield.
enum class yields_by : std::uint8_t {
    recompute,  ///< The pages are given up, and are computed again when the text's turn comes.
    moving,     ///< The pages move to the host and back. Without room there, as `recompute`.
};

/// Pages and steps of an iteration_batch.
struct iteration_options {
    std::uint32_t page_tokens = 16;    ///< Tokens of a page; 1 or more.
    std::uint32_t pages = 0;           ///< Pages of the device, numbered from 0.
    std::uint32_t host_pages = 0;      ///< Pages of the host, numbered from 0.
    std::uint32_t step_tokens = 512;   ///< The most tokens that a step computes.
    std::uint32_t prompt_chunk = ~0U;  ///< The most tokens of one text in a step.
    std::uint32_t texts = 256;         ///< The most texts that have pages at a time.
    /// The fate of a text's pages when the text yields.
    yields_by on_yield = yields_by::recompute;
    bool share_prefixes = true;  ///< Full pages are kept for texts that begin alike.
};

/// A tenant's weight and limits.
struct text_tenant_spec {
    /// The tenant's share of a level's tokens; from 1 to 1,024.
    std::uint32_t weight = 1;
    /// The most pages that the tenant's texts use; a shared page counts once.
    std::uint32_t pages = ~0U;
    /// The most texts of the tenant that wait without pages.
    std::uint32_t max_waiting = 1U << 16;
};

/// A request for a text.
struct text_request {
    std::uint32_t tenant = 0;          ///< The tenant: a number that set_tenant() knows.
    std::vector<text_token> prompt{};  ///< At least one token.
    std::uint32_t most_new = 16;       ///< The most tokens that are added; 1 or more.
    std::optional<text_token> last{};  ///< The token that ends the text, and is part of it.
    int level = 0;                     ///< A higher level goes first; from -64 to 63.
    instant deadline = never;          ///< No step computes the text from then on.
};

/// A text that has ended, for any reason.
struct ended_text {
    text_id id = 0;            ///< As try_push() or try_fork() returned it.
    std::uint32_t tenant = 0;  ///< The text's tenant.
    /// `none` if the text is complete. Otherwise stopped, deadline_exceeded, over_quota, no_room,
    /// closed, or the code that was passed to abort() or fail().
    errc why = errc::none;
    std::vector<text_token> tokens{};  ///< All tokens that were added.
    std::uint32_t yields = 0;          ///< How often the text yielded.
};

/// A reading of an iteration_batch.
struct iteration_usage {
    std::uint32_t pages = 0;  ///< All pages of the device.
    std::uint32_t free = 0;   ///< Empty pages.
    /// Pages of prefixes that no text uses. They are evicted when pages are needed.
    std::uint32_t unused = 0;
    std::uint32_t host_pages = 0;  ///< Pages of the host that are in use.
    std::size_t running = 0;       ///< Texts with pages.
    std::size_t waiting = 0;       ///< Texts without pages.
    std::uint64_t computed = 0;    ///< Tokens that steps computed.
    std::uint64_t found = 0;       ///< Tokens of prompts that were found in prefixes.
    std::uint64_t recomputed = 0;  ///< Tokens that were computed again.
    std::uint64_t yields = 0;      ///< How often a text yielded.
    std::uint64_t moved = 0;       ///< How often a text that yielded was moved to the host.
    std::uint64_t copies = 0;      ///< Pages that were copied before a text wrote to them.
};

/// A reading of one tenant.
struct text_tenant_usage {
    std::uint32_t pages = 0;  ///< Pages that the tenant's texts use.
    std::size_t running = 0;  ///< The tenant's texts with pages.
    std::size_t waiting = 0;  ///< The tenant's texts without pages.
    /// Tokens computed for the tenant, each token of a text counted once.
    std::uint64_t tokens = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
