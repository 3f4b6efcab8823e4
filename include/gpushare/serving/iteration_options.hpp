// SPDX-License-Identifier: Apache-2.0
// Options, requests and figures of an iteration_batch (iteration_batch.hpp).
//
//   gpushare::iteration_options o{.page_tokens = 16, .pages = 4096, .step_tokens = 512};
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
    recompute,  ///< They are given up, and computed again when the text's turn comes.
    moving,     ///< They move to the host and back; without room there: as `recompute`.
};

/// Pages and steps of an iteration_batch.
struct iteration_options {
    std::uint32_t page_tokens = 16;             ///< Tokens of a page; 1 or more.
    std::uint32_t pages = 0;                    ///< Pages of the device, numbered from 0.
    std::uint32_t host_pages = 0;               ///< Pages of the host, numbered from 0.
    std::uint32_t step_tokens = 512;            ///< The most tokens that a step computes.
    std::uint32_t prompt_chunk = ~0U;           ///< The most tokens of one text in a step.
    std::uint32_t texts = 256;                  ///< The most texts that have pages at a time.
    yields_by on_yield = yields_by::recompute;  ///< What a text that yields does with its pages.
    bool share_prefixes = true;                 ///< Full pages are kept for texts that begin alike.
};

/// A tenant's weight and limits.
struct text_tenant_spec {
    std::uint32_t weight = 1;              ///< Its part of a level's tokens; from 1 to 1,024.
    std::uint32_t pages = ~0U;             ///< The most that its texts use; a shared page is one.
    std::uint32_t max_waiting = 1U << 16;  ///< The most of its texts that wait without pages.
};

/// A request for a text.
struct text_request {
    std::uint32_t tenant = 0;          ///< Whose it is: a number that set_tenant() knows.
    std::vector<text_token> prompt{};  ///< One token or more.
    std::uint32_t most_new = 16;       ///< The most tokens that are added; 1 or more.
    std::optional<text_token> last{};  ///< The token that ends the text, and belongs to it.
    int level = 0;                     ///< A higher one goes first; from -64 to 63.
    instant deadline = never;          ///< From then on no step computes it.
};

/// A text that is over, for whatever reason.
struct ended_text {
    text_id id = 0;            ///< What try_push() or try_fork() returned.
    std::uint32_t tenant = 0;  ///< Whose it was.
    /// none: the text is complete. Else stopped, deadline_exceeded, over_quota, no_room, closed, or
    /// what abort() or fail() was told.
    errc why = errc::none;
    std::vector<text_token> tokens{};  ///< All tokens that were added.
    std::uint32_t yields = 0;          ///< How often it yielded.
};

/// A reading of an iteration_batch.
struct iteration_usage {
    std::uint32_t pages = 0;       ///< All pages of the device.
    std::uint32_t free = 0;        ///< Pages with nothing in them.
    std::uint32_t unused = 0;      ///< Pages of prefixes that no text uses: they go by need.
    std::uint32_t host_pages = 0;  ///< Pages of the host that are in use.
    std::size_t running = 0;       ///< Texts with pages.
    std::size_t waiting = 0;       ///< Texts without.
    std::uint64_t computed = 0;    ///< Tokens that steps computed.
    std::uint64_t found = 0;       ///< Tokens of prompts that a prefix had already.
    std::uint64_t recomputed = 0;  ///< Tokens that were computed once more.
    std::uint64_t yields = 0;      ///< How often a text yielded.
    std::uint64_t moved = 0;       ///< How often one moved to the host for it.
    std::uint64_t copies = 0;      ///< Pages that were copied before a text wrote to them.
};

/// A reading of one tenant.
struct text_tenant_usage {
    std::uint32_t pages = 0;   ///< Pages that its texts use.
    std::size_t running = 0;   ///< Its texts with pages.
    std::size_t waiting = 0;   ///< Its texts without.
    std::uint64_t tokens = 0;  ///< Tokens computed for it, those of a text once.
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
