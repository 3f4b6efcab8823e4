// SPDX-License-Identifier: Apache-2.0
// Real engines, by OpenVINO on one thread each: half a second of sound, a page of text, a token of
// a language model. Each call depends on the one before, as in a server, and its answer is compared
// with that of the engine alone.
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

/// Not thread-safe: one call at a time. Its calls go through a script over and over.
class engine {
public:
    virtual ~engine() = default;
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;

    /// Goes through the script once, after a few calls that warm it up; returns what a call takes,
    /// the median.
    gpushare::ns rehearse();
    /// The next call of the script. Between its parts it yields on the SM of `on`, if that isn't
    /// null.
    void call(gpushare::host::kernel_context* on = nullptr) {
        on_ = on;
        if (step(at_) != answers_[at_]) ++mismatches_;
        at_ = (at_ + 1) % answers_.size();
    }
    /// The longest part of a call in the rehearsal: from its beginning or from where it yields to
    /// the next such place or its end.
    [[nodiscard]] gpushare::ns longest_part() const noexcept { return longest_part_; }
    /// Answers that weren't those of the rehearsal.
    [[nodiscard]] std::uint64_t mismatches() const noexcept { return mismatches_; }
    /// What it answered in the rehearsal, in words.
    [[nodiscard]] virtual std::string said() const = 0;
    /// Leaves out a call, so that later answers must be wrong until the script begins anew.
    void skip() { at_ = (at_ + 1) % answers_.size(); }
    /// How many calls its script has.
    [[nodiscard]] std::size_t script() const noexcept { return answers_.size(); }

protected:
    explicit engine(std::size_t script) : answers_(script) {}
    /// Call `i` of the script. It begins anew at 0, whatever was before.
    virtual std::uint64_t step(std::size_t i) = 0;
    /// Between two parts of a call.
    void between_parts() {
        if (on_ != nullptr) gpushare::yield_point(*on_);
        if (part_began_ != gpushare::instant{}) end_part();
    }

private:
    void end_part();

    std::vector<std::uint64_t> answers_;
    gpushare::host::kernel_context* on_ = nullptr;
    gpushare::instant part_began_{};  // while it rehearses
    gpushare::ns longest_part_{};
    std::size_t at_ = 0;
    std::uint64_t mismatches_ = 0;
};

/// Half a second of sound: is somebody speaking?
[[nodiscard]] std::unique_ptr<engine> make_detector();
/// Pages with two lines of text: found, cut out, read.
[[nodiscard]] std::unique_ptr<engine> make_reader();
/// Single lines of text: read. Where there is no language model.
[[nodiscard]] std::unique_ptr<engine> make_line_reader();
/// Tokens that continue a text. Its caches are inputs and outputs, in the caller's memory.
[[nodiscard]] std::unique_ptr<engine> make_language_model(std::pmr::memory_resource& memory);

}  // namespace bench::serving
