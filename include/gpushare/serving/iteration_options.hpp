// SPDX-License-Identifier: Apache-2.0
// Options, requests and figures of an iteration_batch (iteration_batch.hpp).
//
//   gpushare::iteration_options some{.page_tokens = 16, .pages = 4096, .step_tokens = 512};     // 65,536 tokens in pages
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/iteration_step.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What becomes of a text's pages when it has to yield.
enum class yields_by : std::uint8_t {
    recompute,  ///< they are given up, and computed again when its turn comes
    moving,     ///< they are moved to the host, and back; where the host has no room, computed again
};

/// Pages and steps of an iteration_batch.
struct iteration_options {
    std::uint32_t page_tokens = 16;     ///< tokens of a page
    std::uint32_t pages = 0;            ///< of the device, numbered from 0; add_pages() adds others
    std::uint32_t host_pages = 0;       ///< of the host, numbered from 0, for texts that yield by moving
    std::uint32_t step_tokens = 512;    ///< the most tokens that a step computes
    std::uint32_t prompt_chunk = ~0U;   ///< the most tokens of one text in a step
    std::uint32_t texts = 256;          ///< the most that have pages at a time, so that they are in a step
    yields_by on_yield = yields_by::recompute;  ///< what becomes of a text's pages when it has to yield
    bool share_prefixes = true;         ///< full pages are kept and shared by texts of one tenant that begin alike
};

/// A tenant's weight and limits.
struct text_tenant_spec {
    std::uint32_t weight = 1;             ///< its part of the tokens of its level, beside others' weights; 1 to 1,024
    std::uint32_t pages = ~0U;            ///< the most that its texts use at a time; a page that several share counts once
    std::uint32_t max_waiting = 1U << 16; ///< texts that wait for pages; beyond that they are refused
};

/// A request for a text.
struct text_request {
    std::uint32_t tenant = 0;                   ///< whose it is: a number that set_tenant() knows
    std::vector<text_token> prompt{};           ///< one token or more
    std::uint32_t most_new = 16;                ///< tokens to be added, at most; 1 or more
    std::optional<text_token> last{};           ///< the token that ends the text, which belongs to it
    int level = 0;                              ///< a higher one goes first; from -64 to 63
    instant deadline = never;                   ///< from then on it isn't computed any more
};

/// A text that is over, for whatever reason.
struct ended_text {
    text_id id = 0;                     ///< which
    std::uint32_t tenant = 0;           ///< whose
    errc why = errc::none;              ///< none: it is complete. stopped, deadline_exceeded, over_quota, no_room, closed, or what fail() was told
    std::vector<text_token> tokens{};   ///< all that were added
    std::uint32_t yields = 0;           ///< how often it had to
};

/// A reading of an iteration_batch.
struct iteration_usage {
    std::uint32_t pages = 0;         ///< there are
    std::uint32_t free = 0;          ///< hold nothing
    std::uint32_t unused = 0;        ///< hold prefixes that nobody uses; they go when somebody needs a page
    std::uint32_t host_pages = 0;    ///< hold what texts were moved
    std::size_t running = 0;         ///< texts with pages
    std::size_t waiting = 0;         ///< texts without
    std::uint64_t computed = 0;      ///< tokens, so far
    std::uint64_t found = 0;         ///< tokens that weren't computed, since a prefix had them
    std::uint64_t recomputed = 0;    ///< tokens that were computed more than once
    std::uint64_t yields = 0;        ///< how often a text had to
    std::uint64_t moved = 0;         ///< and was moved
    std::uint64_t copies = 0;        ///< pages that were copied before they were written to
};

/// A reading of one tenant.
struct text_tenant_usage {
    std::uint32_t pages = 0;    ///< that its texts use
    std::size_t running = 0;    ///< texts with pages
    std::size_t waiting = 0;    ///< texts without
    std::uint64_t tokens = 0;   ///< that were computed for it, those of one text once
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
