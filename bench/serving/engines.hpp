// SPDX-License-Identifier: Apache-2.0
// Real engines that run on OpenVINO with one thread each. A call processes half a second of sound,
// a page of text, or a token of a language model. As in a server, each call depends on the previous
// call. The engine compares each answer with the answer that it gave alone.
//
//   const auto pages = bench::serving::make_reader();
//   pages->rehearse();     // alone: what the answers are
//   pages->call();         // one page; call(&context): lets more urgent work in between two lines
//   pages->mismatches();   // answers that weren't those
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/units.hpp>

namespace bench::serving {

/// Runs the calls of a script in a loop. Not thread-safe: one call at a time.
class engine {
public:
    virtual ~engine() = default;
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;

    /// Runs the script once, after a few warm-up calls. Returns the median time of a call.
    gpushare::ns rehearse();
    /// Runs the next call of the script. Between the parts of the call, yields on the SM of `on`
    /// unless `on` is null.
    void call(gpushare::host::kernel_context* on = nullptr) {
        on_ = on;
        if (step(at_) != answers_[at_]) ++mismatches_;
        at_ = (at_ + 1) % answers_.size();
    }
    /// The longest part of a call in the rehearsal. A part lasts from the start of the call or a
    /// yield point to the next yield point or the end of the call.
    [[nodiscard]] gpushare::ns longest_part() const noexcept { return longest_part_; }
    /// The number of answers that differ from the rehearsal.
    [[nodiscard]] std::uint64_t mismatches() const noexcept { return mismatches_; }
    /// The answers in the rehearsal, as text.
    [[nodiscard]] virtual std::string said() const = 0;
    /// Leaves out a call, so that later answers must be wrong until the script starts again.
    void skip() { at_ = (at_ + 1) % answers_.size(); }
    /// The number of calls in the script.
    [[nodiscard]] std::size_t script() const noexcept { return answers_.size(); }

protected:
    explicit engine(std::size_t script) : answers_(script) {}
    /// Runs call `i` of the script. Call 0 resets the state of the model.
    virtual std::uint64_t step(std::size_t i) = 0;
    /// Called between two parts of a call.
    void between_parts() {
        if (on_ != nullptr) gpushare::yield_point(*on_);
        if (part_began_ != gpushare::instant{}) end_part();
    }

private:
    void end_part();

    std::vector<std::uint64_t> answers_;
    gpushare::host::kernel_context* on_ = nullptr;
    gpushare::instant part_began_{};  // set during the rehearsal
    gpushare::ns longest_part_{};
    std::size_t at_ = 0;
    std::uint64_t mismatches_ = 0;
};

/// Detects speech in half a second of sound.
[[nodiscard]] std::unique_ptr<engine> make_detector();
/// Reads pages with two lines of text: finds, cuts out and recognises the lines.
[[nodiscard]] std::unique_ptr<engine> make_reader();
/// Reads single lines of text. Stands in for the language model.
[[nodiscard]] std::unique_ptr<engine> make_line_reader();
/// Continues a text token by token. The caches are inputs and outputs in memory from the caller.
[[nodiscard]] std::unique_ptr<engine> make_language_model(std::pmr::memory_resource& memory);

}  // namespace bench::serving
