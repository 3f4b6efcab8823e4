// SPDX-License-Identifier: Apache-2.0
// One chunk of a collective on its way through an MPI: the messages of each phase, and the work
// between the messages. A state machine that never waits; mpi.hpp drives it.
//
//   auto t = mpi_transfer::one_shot(in, out, n, signature, &combine_floats);
//   t.number(by, 17, signature);   t.begin(comm, rank, size);
//   while (!t.done()) ...                              // t.add_requests(all, whose); MPI_Testsome; t.finished(...) for some; t.go_on(comm)
//
// Ranks compare their calls in two ways. A message's tag holds a few bits of the call's signature,
// so messages of different calls seldom match, and a waiting rank sees that another call's message
// came instead (differs_from). A tag is too short to rule out all matches. So each call also has
// one transfer in one shot, whose messages end with the whole signature. Ranks send a message even
// if it has no elements.
#pragma once

#if __has_include(<mpi.h>)

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class mpi_transfer {
    /// The phases are scatter (parts go to the ranks that combine them), combine, and gather
    /// (results go to all ranks).
    enum class shape : std::uint8_t { all_reduce, one_shot, scatter, gather, from_root, exchange, pairs };

public:
    /// Combines what all ranks sent, `bytes` of each, in the order of the ranks.
    using combiner = void (*)(const std::byte* const* parts, std::uint32_t ranks, std::byte* out, std::size_t bytes);

    static constexpr int notice_tag = 1, shrink_tag = 2, first_tag = 8;

    /// An all-reduce of `bytes` bytes, in elements of `unit` bytes.
    [[nodiscard]] static mpi_transfer all_reduce(const std::byte* in, std::byte* out, std::size_t bytes,
                                                 std::size_t unit, combiner by) noexcept {
        return {shape::all_reduce, in, out, bytes, unit, 0, by};
    }
    /// Every rank's data goes to all ranks, followed by the signature of the call.
    [[nodiscard]] static mpi_transfer one_shot(const std::byte* in, std::byte* out, std::size_t bytes,
                                               std::uint64_t signature, combiner by) noexcept {
        mpi_transfer t{shape::one_shot, in, out, bytes, 1, 0, by};
        t.signature_ = signature;
        return t;
    }
    /// Every rank sends only the signature, for a call whose other messages don't have it.
    [[nodiscard]] static mpi_transfer agreement(std::uint64_t signature) noexcept {
        return one_shot(nullptr, nullptr, 0, signature, nullptr);
    }
    /// An agreement between this rank and the ranks `with`.
    [[nodiscard]] static mpi_transfer agreement(std::uint64_t signature, std::span<const std::uint32_t> with) {
        mpi_transfer t = agreement(signature);
        t.neighbours_.assign(with.begin(), with.end());
        std::sort(t.neighbours_.begin(), t.neighbours_.end());
        t.neighbours_.erase(std::unique(t.neighbours_.begin(), t.neighbours_.end()), t.neighbours_.end());
        t.with_some_ = true;
        return t;
    }
    /// Rank q gets the bytes at q * stride of `in`.
    [[nodiscard]] static mpi_transfer scatter(const std::byte* in, std::byte* out, std::size_t bytes,
                                              std::size_t stride, combiner by) noexcept {
        return {shape::scatter, in, out, bytes, 1, stride, by};
    }
    /// Sends rank q's part of `out`, at q * stride, to all ranks.
    [[nodiscard]] static mpi_transfer gather(std::byte* out, std::size_t bytes, std::size_t stride) noexcept {
        return {shape::gather, nullptr, out, bytes, 1, stride, nullptr};
    }
    /// Like scatter(), for parts of different lengths: `parts[q]`, in bytes, is the part of `in`
    /// that rank q gets. This rank's result goes to `out`.
    [[nodiscard]] static mpi_transfer scatter_parts(const std::byte* in, std::byte* out,
                                                    std::vector<element_range> parts, combiner by) noexcept {
        mpi_transfer t{shape::scatter, in, out, 0, 1, 0, by};
        t.parts_ = std::move(parts);
        return t;
    }
    /// Like gather(), for parts of different lengths: `parts[q]`, in bytes, is the part of `out`
    /// that rank q has.
    [[nodiscard]] static mpi_transfer gather_parts(std::byte* out, std::vector<element_range> parts) noexcept {
        mpi_transfer t{shape::gather, nullptr, out, 0, 1, 0, nullptr};
        t.parts_ = std::move(parts);
        return t;
    }
    [[nodiscard]] static mpi_transfer from_root(std::byte* data, std::size_t bytes, std::uint32_t root) noexcept {
        mpi_transfer t{shape::from_root, data, data, bytes, 1, 0, nullptr};
        t.root_ = root;
        return t;
    }

    /// Each neighbour gets the bytes at `in` and sends as many bytes. The bytes of neighbour i
    /// begin at stride * i of `out`.
    [[nodiscard]] static mpi_transfer exchange(const std::byte* in, std::byte* out, std::size_t bytes,
                                               std::size_t stride, std::span<const std::uint32_t> neighbours) {
        mpi_transfer t{shape::exchange, in, out, bytes, 1, stride, nullptr};
        t.neighbours_.assign(neighbours.begin(), neighbours.end());
        return t;
    }

    /// Rank q gets to[q] of `in`, and sends data for this rank, which goes to from[q] of `out`;
    /// both are in bytes. The two ranks of a pair agree on the length.
    [[nodiscard]] static mpi_transfer exchange_parts(const std::byte* in, std::byte* out, std::vector<element_range> to,
                                                     std::vector<element_range> from) noexcept {
        mpi_transfer t{shape::pairs, in, out, 0, 1, 0, nullptr};
        t.parts_ = std::move(to);
        t.parts_from_ = std::move(from);
        return t;
    }

    /// How a tag is made from a transfer's number, the call's signature and the phase.
    struct numbering {
        std::uint32_t numbers = 0, kinds = 1;
        /// For tags up to `last_tag`. Takes the most kinds of calls, up to 4096, that leave 2^18
        /// numbers, one for each chunk under way.
        explicit numbering(int last_tag = first_tag) noexcept {
            const auto all = static_cast<std::uint32_t>(last_tag - first_tag) / 2;
            while (kinds < 4096 && all / (kinds * 2) >= 1U << 18) kinds *= 2;
            numbers = all / kinds;
        }
    };
    /// Gives the transfer its number. `n` is the same on all ranks, and no other transfer under way
    /// has it.
    void number(const numbering& by, std::uint32_t n, std::uint64_t signature) noexcept {
        first_of_number_ = first_tag + static_cast<int>(n * by.kinds) * 2;
        tags_of_number_ = static_cast<int>(by.kinds) * 2;
        tag_ = first_of_number_ + static_cast<int>(signature % by.kinds) * 2;
    }
    /// A rank that sent another call's message in place of this call's.
    [[nodiscard]] std::optional<std::uint32_t> differs_from(MPI_Comm comm) const noexcept {
        for (std::size_t i = 0; i < requests_.size(); ++i) {
            if (requests_[i] == MPI_REQUEST_NULL || !messages_[i].receives) continue;
            int there = 0;
            MPI_Status s;
            if (MPI_Iprobe(static_cast<int>(messages_[i].peer), MPI_ANY_TAG, comm, &there, &s) != MPI_SUCCESS ||
                there == 0)
                continue;
            const int behind = s.MPI_TAG - first_of_number_;
            if (behind >= 0 && behind < tags_of_number_ && s.MPI_TAG / 2 != tag_ / 2) return messages_[i].peer;
        }
        return std::nullopt;
    }
    [[nodiscard]] bool done() const noexcept { return phase_ == 2; }
    [[nodiscard]] std::size_t sent() const noexcept { return sent_; }

    [[nodiscard]] errc begin(MPI_Comm comm, std::uint32_t rank, std::uint32_t size) {
        rank_ = rank;
        size_ = size;
        return how_ == shape::gather ? next(comm) : post_first(comm);
    }
    /// An error code, and the rank at fault.
    struct outcome {
        errc code = errc::none;
        std::uint32_t rank = 0;
    };
    /// A request of a transfer that is under way.
    struct pending {
        mpi_transfer* of;
        std::size_t which;
    };
    /// Appends the unfinished requests. One call of the MPI tests the requests of all transfers,
    /// because each call polls the network, and some MPIs yield the core in each call that finds
    /// nothing.
    void add_requests(std::vector<MPI_Request>& requests, std::vector<pending>& whose) {
        for (std::size_t i = 0; i < requests_.size(); ++i) {
            if (requests_[i] == MPI_REQUEST_NULL) continue;
            requests.push_back(requests_[i]);
            whose.push_back({this, i});
        }
    }
    /// Stores the request as the MPI left it.
    void put_back(std::size_t i, MPI_Request r) noexcept { requests_[i] = r; }
    /// Request `i` is finished. `error` is MPI_SUCCESS, or the error of its status.
    void finished(std::size_t i, const MPI_Status& s, int error) noexcept {
        const message& m = messages_[i];
        requests_[i] = MPI_REQUEST_NULL;
        int got = m.size;
        if (error == MPI_SUCCESS && m.receives && MPI_Get_count(&s, MPI_BYTE, &got) != MPI_SUCCESS) got = -1;
        if (failed_.code != errc::none) return;
        if (error == MPI_SUCCESS && got == m.size && (!m.receives || signed_alike(m.peer))) return;
        failed_ = {error == MPI_SUCCESS || error == MPI_ERR_TRUNCATE ? errc::mismatch : errc::aborted, m.peer};
    }
    /// Call this after finished(). Begins the next phase if the current phase is over.
    [[nodiscard]] outcome go_on(MPI_Comm comm) {
        if (done() || failed_.code != errc::none) return failed_;
        if (std::any_of(requests_.begin(), requests_.end(), [](MPI_Request r) { return r != MPI_REQUEST_NULL; }))
            return {};
        return {next(comm), rank_};
    }
    /// The first rank whose message hasn't come, or else the first rank that hasn't taken its
    /// message.
    [[nodiscard]] std::uint32_t waits_for() const noexcept {
        for (const bool receives : {true, false})
            for (std::size_t i = 0; i < requests_.size(); ++i)
                if (requests_[i] != MPI_REQUEST_NULL && messages_[i].receives == receives) return messages_[i].peer;
        return rank_;
    }
    /// Gives up all requests. Returns false if the MPI may still read or write a buffer.
    bool cancel() noexcept {
        bool all = true;
        for (std::size_t i = 0; i < requests_.size(); ++i) {
            if (requests_[i] == MPI_REQUEST_NULL) continue;
            int over = 0;
            if (messages_[i].receives) MPI_Cancel(&requests_[i]);
            for (int turn = 0; over == 0 && turn < 100; ++turn) MPI_Test(&requests_[i], &over, MPI_STATUS_IGNORE);
            if (over == 0) {
                all = false;
                MPI_Request_free(&requests_[i]);
            }
        }
        // a message may still come in, so its memory isn't freed
        if (!all) (void)staging_.release();
        return all;
    }

private:
    struct message {
        std::uint32_t peer;
        int size;
        bool receives;
    };

    mpi_transfer(shape how, const std::byte* in, std::byte* out, std::size_t bytes, std::size_t unit,
                 std::size_t stride, combiner by) noexcept
        : how_(how), in_(in), out_(out), bytes_(bytes), unit_(unit), stride_(stride), combine_(by) {}

    /// The place of rank `q`'s message in a transfer in one shot. This rank has a message, too.
    [[nodiscard]] std::byte* message_of(std::uint32_t q) const noexcept {
        return staging_.get() + q * room_of_message();
    }
    [[nodiscard]] std::size_t size_of_message() const noexcept { return bytes_ + sizeof signature_; }
    [[nodiscard]] std::size_t room_of_message() const noexcept {
        constexpr std::size_t grain = 16;  // elements of any type may begin there
        return (size_of_message() + grain - 1) / grain * grain;
    }
    /// Whether a rank made the same call, as far as its message tells.
    [[nodiscard]] bool signed_alike(std::uint32_t q) const noexcept {
        return how_ != shape::one_shot || std::memcmp(message_of(q) + bytes_, &signature_, sizeof signature_) == 0;
    }
    /// The beginning of a rank's block, and its length.
    [[nodiscard]] std::size_t begin_of(std::uint32_t q) const noexcept {
        if (!parts_.empty()) return parts_[q].begin;
        return stride_ != 0 ? q * stride_ : part(q).begin * unit_;
    }
    [[nodiscard]] std::size_t size_of(std::uint32_t q) const noexcept {
        if (!parts_.empty()) return parts_[q].size();
        return stride_ != 0 ? bytes_ : part(q).size() * unit_;
    }
    [[nodiscard]] element_range part(std::uint32_t q) const noexcept {
        return shard_of(bytes_ / unit_, q, size_, std::max<std::size_t>(64 / unit_, 1));
    }

    [[nodiscard]] errc receive(std::uint32_t from, std::byte* to, std::size_t n, int tag, MPI_Comm comm) {
        messages_.push_back({from, static_cast<int>(n), true});
        const int code = MPI_Irecv(to, static_cast<int>(n), MPI_BYTE, static_cast<int>(from), tag, comm,
                                   &requests_.emplace_back(MPI_REQUEST_NULL));
        return code == MPI_SUCCESS ? errc::none : errc::backend_failed;
    }
    [[nodiscard]] errc send(std::uint32_t to, const std::byte* from, std::size_t n, int tag, MPI_Comm comm) {
        sent_ += n;
        messages_.push_back({to, static_cast<int>(n), false});
        const int code = MPI_Isend(from, static_cast<int>(n), MPI_BYTE, static_cast<int>(to), tag, comm,
                                   &requests_.emplace_back(MPI_REQUEST_NULL));
        return code == MPI_SUCCESS ? errc::none : errc::backend_failed;
    }
    /// Calls f with each other rank, from the next rank on, so that the ranks begin with different
    /// ranks.
    template <class F>
    [[nodiscard]] errc for_others(const F& f) const {
        if (with_some_) {
            for (const std::uint32_t q : neighbours_)
                if (const errc code = f(q); code != errc::none) return code;
            return errc::none;
        }
        for (std::uint32_t i = 1; i < size_; ++i)
            if (const errc code = f((rank_ + i) % size_); code != errc::none) return code;
        return errc::none;
    }

    [[nodiscard]] errc post_first(MPI_Comm comm) {
        if (how_ == shape::from_root) {
            // the rank's number in a binomial tree
            const std::uint32_t v = (rank_ + size_ - root_) % size_;
            if (v == 0) return next(comm);
            return receive(((v & (v - 1)) + root_) % size_, out_, bytes_, tag_, comm);
        }
        if (how_ == shape::exchange) {
            errc code = errc::none;
            for (std::size_t i = 0; i < neighbours_.size() && code == errc::none; ++i)
                code = receive(neighbours_[i], out_ + i * stride_, bytes_, tag_, comm);
            for (std::size_t i = 0; i < neighbours_.size() && code == errc::none; ++i)
                code = send(neighbours_[i], in_, bytes_, tag_, comm);
            return code != errc::none || !requests_.empty() ? code : next(comm);
        }
        if (how_ == shape::one_shot) return post_one_shot(comm);
        if (how_ == shape::pairs) return post_pairs(comm);
        const std::size_t mine = size_of(rank_);
        staging_ = std::make_unique_for_overwrite<std::byte[]>(mine * size_);
        const errc code =
            for_others([&](std::uint32_t q) { return receive(q, staging_.get() + q * mine, mine, tag_, comm); });
        if (code != errc::none) return code;
        const errc failed =
            for_others([&](std::uint32_t q) { return send(q, in_ + begin_of(q), size_of(q), tag_, comm); });
        return failed != errc::none || !requests_.empty() ? failed : next(comm);
    }
    [[nodiscard]] errc post_one_shot(MPI_Comm comm) {
        staging_ = std::make_unique_for_overwrite<std::byte[]>(room_of_message() * size_);
        std::byte* const own = message_of(rank_);
        if (bytes_ != 0) std::memcpy(own, in_, bytes_);
        std::memcpy(own + bytes_, &signature_, sizeof signature_);
        const errc code =
            for_others([&](std::uint32_t q) { return receive(q, message_of(q), size_of_message(), tag_, comm); });
        if (code != errc::none) return code;
        const errc failed = for_others([&](std::uint32_t q) { return send(q, own, size_of_message(), tag_, comm); });
        sent_ -= requests_.size() / 2 * sizeof signature_;  // signatures don't count
        return failed != errc::none || !requests_.empty() ? failed : next(comm);
    }
    [[nodiscard]] errc post_pairs(MPI_Comm comm) {
        const errc code = for_others([&](std::uint32_t q) {
            return receive(q, out_ + parts_from_[q].begin, parts_from_[q].size(), tag_, comm);
        });
        if (code != errc::none) return code;
        const errc failed =
            for_others([&](std::uint32_t q) { return send(q, in_ + begin_of(q), size_of(q), tag_, comm); });
        return failed != errc::none || !requests_.empty() ? failed : next(comm);
    }
    void combine_mine() {
        const bool whole = how_ == shape::one_shot;
        const std::size_t mine = whole ? bytes_ : size_of(rank_);
        if (mine == 0) return;
        std::vector<const std::byte*> parts(size_);
        for (std::uint32_t q = 0; q < size_; ++q) parts[q] = whole ? message_of(q) : staging_.get() + q * mine;
        if (!whole) parts[rank_] = in_ + begin_of(rank_);
        combine_(parts.data(), size_, how_ == shape::all_reduce ? out_ + begin_of(rank_) : out_, mine);
    }
    [[nodiscard]] errc next(MPI_Comm comm) {
        requests_.clear();
        messages_.clear();
        ++phase_;
        if (phase_ == 2) return errc::none;
        if (combine_ != nullptr) combine_mine();
        errc code = errc::none;
        if (how_ == shape::from_root) {
            const std::uint32_t v = (rank_ + size_ - root_) % size_;
            for (std::uint32_t bit = 1; bit < size_ && (v & bit) == 0 && code == errc::none; bit <<= 1)
                if (v + bit < size_) code = send((v + bit + root_) % size_, out_, bytes_, tag_, comm);
        } else if (how_ == shape::all_reduce || how_ == shape::gather) {
            code =
                for_others([&](std::uint32_t q) { return receive(q, out_ + begin_of(q), size_of(q), tag_ + 1, comm); });
            if (code == errc::none)
                code = for_others(
                    [&](std::uint32_t q) { return send(q, out_ + begin_of(rank_), size_of(rank_), tag_ + 1, comm); });
        }
        return code != errc::none || !requests_.empty() ? code : next(comm);
    }

    shape how_;
    int phase_ = 0;  // 0: scatter, 1: gather, 2: done
    int tag_ = 0, first_of_number_ = 0, tags_of_number_ = 0;
    std::uint32_t rank_ = 0, size_ = 1, root_ = 0;
    std::uint64_t signature_ = 0;  // the signature of a transfer in one shot
    bool with_some_ = false;       // whether this is an agreement with some ranks only
    const std::byte* in_;
    std::byte* out_;
    std::size_t bytes_, unit_, stride_;
    std::size_t sent_ = 0;
    outcome failed_;
    combiner combine_;
    std::vector<std::uint32_t> neighbours_;
    // the part of each rank, in bytes, if parts differ in length
    std::vector<element_range> parts_;
    std::vector<element_range> parts_from_;  // the place in `out` of each rank's data
    std::unique_ptr<std::byte[]> staging_;   // received parts to combine
    std::vector<MPI_Request> requests_;
    std::vector<message> messages_;  // the messages that belong to the requests
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
