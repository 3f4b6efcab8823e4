// SPDX-License-Identifier: Apache-2.0
// An engine for batching by iteration. Its next token depends on every token of the text, as read
// through the text's page table. So a wrong page, an overwritten page or a missing move gives
// another text.
//
//   support::toy_decoder engine(4, 16, 8);   engine.step(plan, next);
//   support::toy_decoder::alone(prompt, most_new, last);  // the tokens that follow it
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_options.hpp>

namespace support {

class toy_decoder {
public:
    using token = gpushare::text_token;
    static constexpr token vocabulary = 1000;

    toy_decoder(std::uint32_t page_tokens, std::uint32_t pages, std::uint32_t host_pages = 0)
        : page_tokens_(page_tokens),
          device_(std::size_t{page_tokens} * pages),
          host_(std::size_t{page_tokens} * host_pages) {}
    /// Uses pages of another owner: `address` returns the place of a page's slots, of eight bytes
    /// each.
    toy_decoder(std::uint32_t page_tokens, std::function<void*(std::uint32_t)> address)
        : page_tokens_(page_tokens), address_(std::move(address)) {}

    void step(const gpushare::step_plan& plan, std::span<token> next) {
        for (const auto& m : plan.moves)
            if (!leaves_out[static_cast<std::size_t>(m.kind)]) move(m);
        for (std::size_t i = 0; i < plan.entries.size(); ++i) next[i] = compute(plan.entries[i]);
        ++steps;
    }

    /// The tokens that the engine adds to the prompt if the text runs alone.
    static std::vector<token> alone(std::span<const token> prompt, std::uint32_t most_new,
                                    std::optional<token> last = {}) {
        std::uint64_t read = 0;
        std::uint32_t position = 0;
        for (const auto t : prompt) read = mix(read, slot(t, position++, read));
        std::vector<token> added;
        while (added.size() < most_new) {
            added.push_back(sample(read));
            if (added.back() == last) break;
            read = mix(read, slot(added.back(), position++, read));
        }
        return added;
    }

    /// A fault for tests: the engine doesn't carry out moves of these kinds.
    std::array<bool, 3> leaves_out{};
    std::size_t steps = 0;

private:
    static std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept {
        a = (a ^ b) * 0xff51afd7ed558ccdU;
        return a ^ (a >> 29);
    }
    /// The cache's entry for a token. It depends on all earlier tokens, as keys and values do.
    static std::uint64_t slot(token t, std::uint32_t position, std::uint64_t read) noexcept {
        return mix(mix(t + 1, position + 1), read);
    }
    static token sample(std::uint64_t read) noexcept { return static_cast<token>(mix(read, 7) % vocabulary); }

    std::uint64_t* page(std::vector<std::uint64_t>& in, std::uint32_t number) {
        if (&in == &device_ && address_) return static_cast<std::uint64_t*>(address_(number));
        return &in.at(std::size_t{number} * page_tokens_);
    }
    void move(const gpushare::page_move& m) {
        auto& from = m.kind == gpushare::page_move_kind::to_device ? host_ : device_;
        auto& to = m.kind == gpushare::page_move_kind::to_host ? host_ : device_;
        std::copy_n(page(from, m.from), page_tokens_, page(to, m.to));
    }
    std::uint64_t& at(const gpushare::step_entry& e, std::uint32_t position) {
        if (position / page_tokens_ >= e.pages.size()) throw std::logic_error("a position without a page");
        return page(device_, e.pages[position / page_tokens_])[position % page_tokens_];
    }
    token compute(const gpushare::step_entry& e) {
        std::uint64_t read = 0;
        for (std::uint32_t p = 0; p < e.begin; ++p) read = mix(read, at(e, p));
        auto position = e.begin;
        for (const auto t : e.tokens) {
            at(e, position) = slot(t, position, read);
            read = mix(read, at(e, position));
            ++position;
        }
        return sample(read);
    }

    std::uint32_t page_tokens_;
    std::vector<std::uint64_t> device_{}, host_{};  // a slot for each token of each page
    std::function<void*(std::uint32_t)> address_{};
};
static_assert(gpushare::iteration_engine<toy_decoder>);

}  // namespace support
