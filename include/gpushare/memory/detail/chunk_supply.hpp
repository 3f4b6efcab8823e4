// SPDX-License-Identifier: Apache-2.0
// The physical chunks of a device: made when they are needed, handed out ready to be seen by who takes them, scrubbed
// in between. chunk_pool puts a lock, quotas and address ranges around it.
//
//   gpushare::chunk_supply supply{memory, stream, {.capacity = 512}};
//   if (supply.provide(chat, 3).code == errc::none) ... supply.take(chat) ... three times
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/chunk_book.hpp>
#include <gpushare/memory/detail/scrub_window.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/tenant_tag.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

struct chunk_pool_options {
    std::size_t capacity = 0;  // chunks at the most
    std::size_t initial = 0;   // of these, made at once; others are made when they are needed
    scrub_policy scrub = scrub_policy::on_hand_over;
    std::size_t window = 16;  // chunks that are scrubbed at a time, 1 or more
};

/// A reading of a pool, in chunks; consistent.
struct chunk_pool_usage {
    std::size_t capacity = 0;
    std::size_t made = 0;       // of the capacity
    std::size_t mapped = 0;     // of these, in arenas, with those that wait for a stream before they leave
    std::size_t leaving = 0;    // of the mapped ones, those that wait
    std::size_t clean = 0;      // free, and anybody's at once
    std::size_t dirty = 0;      // free, but to be scrubbed for all but the last owner, if that is still there
    std::size_t scrubbing = 0;  // free once that is done
};

/// Refers to the memory and the stream, which must outlive it. Not thread-safe. All chunks must be back, and no
/// scrubbing under way, when it is destroyed.
template <virtual_memory Memory, scrubber Stream>
class chunk_supply {
public:
    using index = chunk_book::index;
    using point = typename Stream::point;

    /// Throws memory_error (out_of_memory) without `initial` chunks, operation_error (invalid_specification).
    chunk_supply(Memory& memory, Stream& stream, const chunk_pool_options& options)
        : memory_(&memory), options_(checked(options)), book_(options.scrub), window_(memory, stream, options.window) {
        while (book_.total() < options.initial)
            if (const errc why = create(); why != errc::none)
                raise({.code = why,
                       .asked = (chunk_size() * options.initial).count(),
                       .left = (chunk_size() * book_.total()).count(),
                       .limit = (chunk_size() * options.capacity).count()},
                      {}, "making a chunk pool");
    }

    /// Sees to it that `tenant` can take `n` chunks. Makes new ones where too few are free. errc::none: take() them
    /// before anybody else does. deadline_exceeded: enough are free, and some are being scrubbed; ask again when one of
    /// points() is reached. out_of_memory: too few are free, `left` says how many bytes. May throw std::bad_alloc.
    [[nodiscard]] failure provide(tenant_tag tenant, std::size_t n) {
        // A chunk that is clean from the start is there at once; one that isn't is no better than those that are free.
        errc made = errc::none;
        const auto enough = [&] { return (Memory::fresh_is_zero ? book_.ready(tenant) : book_.available()) >= n; };
        while (!enough() && made == errc::none) made = create();
        const failure figures{.asked = (chunk_size() * n).count(),
                              .left = (chunk_size() * book_.available()).count(),
                              .limit = (chunk_size() * options_.capacity).count()};
        const auto because = [&](errc why) {
            failure f = figures;
            f.code = why;
            return f;
        };
        if (book_.available() < n) return because(made == errc::device_lost ? made : errc::out_of_memory);
        while (book_.ready(tenant) + book_.scrubbing() < n && !window_.full())
            if (const errc why = scrub(book_.begin_scrub(tenant)); why != errc::none) return because(why);
        window_.seal();
        return book_.ready(tenant) >= n ? failure{} : because(errc::deadline_exceeded);
    }

    /// After provide().
    index take(tenant_tag tenant) noexcept { return book_.take(tenant); }
    [[nodiscard]] const typename Memory::chunk& physical(index i) const noexcept { return *chunks_[i]; }
    /// A chunk that is mapped nowhere any more, but in the scrub window perhaps.
    void give(index i) noexcept {
        if (window_.holds(i))
            book_.give_scrubbing(i);
        else
            book_.give(i);
    }
    void pass(index i, tenant_tag to) noexcept { book_.pass(i, to); }

    /// Begins to scrub free chunks, at most `most` of them, as far as the window has room. Returns how many.
    std::size_t scrub_ahead(std::size_t most) noexcept {
        std::size_t begun = 0;
        while (begun < most && book_.dirty() != 0 && !window_.full() && scrub(book_.begin_scrub()) == errc::none)
            ++begun;
        window_.seal();
        return begun;
    }
    /// Begins to scrub a taken chunk; see scrub_window::begin.
    errc scrub_taken(index i) noexcept { return window_.begin(i, physical(i)); }
    void seal() noexcept { window_.seal(); }
    [[nodiscard]] bool scrubs(index i) const noexcept { return window_.holds(i); }

    /// Takes in chunks whose scrubbing has ended. True if there was one.
    bool collect() noexcept {
        const auto failed = failed_;
        const bool any = window_.finish([this](index i, errc why) {
            if (why != errc::none) {
                ++failed_;
                why_failed_ = why;
            }
            if (!book_.is_out(i)) book_.end_scrub(i, why == errc::none);
        }) != 0;
        // What failed now isn't tried again before the next call: the device may be lost.
        if (book_.policy() == scrub_policy::on_free && failed_ == failed) scrub_ahead(options_.window);
        return any;
    }
    /// How often scrubbing has failed so far, and why the last time.
    [[nodiscard]] std::uint64_t failed() const noexcept { return failed_; }
    [[nodiscard]] errc why_failed() const noexcept { return why_failed_; }
    void add_points(std::vector<point>& to) const { window_.add_points(to); }
    [[nodiscard]] bool scrubbing() const noexcept { return window_.active() != 0; }

    /// Gives free chunks back to the device until `keep` are left. Returns how many.
    std::size_t trim(std::size_t keep) noexcept {
        std::size_t gone = 0;
        for (; book_.clean() + book_.dirty() > keep; ++gone) chunks_[book_.drop()].reset();
        return gone;
    }

    [[nodiscard]] bytes chunk_size() const noexcept { return memory_->granularity(); }
    [[nodiscard]] std::size_t capacity() const noexcept { return options_.capacity; }
    [[nodiscard]] chunk_book& book() noexcept { return book_; }
    [[nodiscard]] const chunk_book& book() const noexcept { return book_; }

private:
    static const chunk_pool_options& checked(const chunk_pool_options& o) {
        if (o.initial > o.capacity || o.capacity >= chunk_book::none || o.window == 0)
            raise({.code = errc::invalid_specification, .asked = o.initial, .limit = o.capacity}, {}, "chunk pool");
        return o;
    }

    errc create() {
        if (book_.total() >= options_.capacity) return errc::out_of_memory;
        if (book_.total() >= chunks_.size()) chunks_.emplace_back();  // before anything is made, since it may throw
        auto made = memory_->create();
        if (!made) return made.code();
        chunks_[book_.add(Memory::fresh_is_zero)] = *std::move(made);
        return errc::none;
    }

    // A chunk that book_ has begun to scrub.
    errc scrub(index i) noexcept {
        const errc why = window_.begin(i, physical(i));
        if (why != errc::none) book_.end_scrub(i, false);
        return why;
    }

    Memory* memory_;
    chunk_pool_options options_;
    chunk_book book_;
    std::vector<std::optional<typename Memory::chunk>> chunks_;
    scrub_window<Memory, Stream> window_;
    std::uint64_t failed_ = 0;
    errc why_failed_ = errc::none;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
