// SPDX-License-Identifier: Apache-2.0
// Submits work that fails on the device, in every way that a limiter offers, while another thread
// records points on the stream. Whichever thread looks at the device meanwhile, only the submitter
// gets the failure.
//
//   support::composition::failures<stream, clock> tried{clock, stream, other_stream, fail, work};
//   for (const auto& what : tried.wrong(tried.usual())) ...      // "request, records behind: reported as fine"
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/detail/device_order_lock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/detached.hpp"

namespace support::composition {

/// Uses one stream, and another one for gangs, each with a limiter.
template <class Stream, gpushare::clock Clock>
class failures {
    using errc = gpushare::errc;
    using limiter = gpushare::compute_limiter<Stream, Clock>;
    using gang = gpushare::gang_permit<limiter>;

public:
    using work = std::function<void(Stream&)>;
    struct meanwhile {
        std::string_view name;
        work before, behind;  ///< within the submission, around the failing work; `behind` also follows more work
    };

    /// `fail` enqueues work that fails, and `good` work that succeeds.
    template <std::invocable<Stream&> Fail, std::invocable<Stream&> Good>
    failures(Clock time, Stream& on, Stream& other, Fail fail, Good good)
        : here_({.quarantine_after = 3}, time),
          there_({.quarantine_after = 3}, time),
          on_(&on),
          other_(&other),
          fail_(std::move(fail)),
          good_(std::move(good)) {}

    /// Tries each way to submit with each of `all`, and returns the wrong reports.
    [[nodiscard]] std::vector<std::string> wrong(const std::vector<meanwhile>& all) {
        std::vector<std::string> found;
        for (const auto& [name, enter] : entries())
            for (const auto& m : all) {
                const auto what = told_wrongly(enter, m);
                if (!what.empty()) found.push_back(std::string(name) + ", " + std::string(m.name) + ": " + what);
            }
        return found;
    }

private:
    /// A way to submit work. Returns whether the work was reported as failed.
    using entry = bool (failures::*)(const work&);
    struct named_entry {
        std::string_view name;
        entry enter;
    };
    [[nodiscard]] static std::vector<named_entry> entries() {
        return {{"submit", &failures::by_submit},           {"callback", &failures::by_callback},
                {"request", &failures::by_request},         {"permit", &failures::by_permit},
                {"enqueue", &failures::by_enqueue},         {"gang", &failures::by_gang},
                {"gang in one", &failures::by_nested_gang}, {"chunks", &failures::by_chunks},
                {"coroutine", &failures::by_coroutine}};
    }

public:
    /// All the usual ways to use points, whatever the stack.
    [[nodiscard]] std::vector<meanwhile> usual() {
        const auto nothing = [](Stream&) {};
        const auto records = [this](Stream& s) { points_.push_back(s.record()); };
        const auto other_thread = [this](Stream& s) { std::thread([&] { points_.push_back(s.record()); }).join(); };
        return {{"nobody", nothing, nothing},
                {"records in front", records, nothing},
                {"records behind", nothing, records},
                {"records around", records, records},
                {"another thread records", other_thread, other_thread}};
    }

private:
    std::string told_wrongly(entry enter, const meanwhile& m) {
        mine_ = here_.add({}), theirs_ = there_.add({});
        points_.clear();
        std::string what;
        const auto check = [&](bool good, std::string_view otherwise) {
            if (!good && what.empty()) what = otherwise;
        };
        good_(*on_);
        (void)on_->record();
        const auto fails = [&](Stream& s) {
            m.before(s);
            fail_(s);
            m.behind(s);
            good_(s);
            m.behind(s);
        };
        const auto fine = [&](Stream& s) {
            m.before(s);
            good_(s);
            m.behind(s);
        };
        check((this->*enter)(fails), "reported as fine");
        check(here_.usage(mine_).failed == 1, "not counted");
        check(!(this->*enter)(fine), "what is fine is reported as failed");
        fail_past_it();
        check(!(this->*enter)(fine), "what failed in front of it is reported as its failure");
        check(here_.usage(mine_).failed == 1, "what is fine is counted");
        for (int i = 0; i < 3; ++i) check((this->*enter)(fails), "one of several is reported as fine");
        check(here_.try_acquire(mine_).code() == errc::quarantined, "not quarantined");
        check(here_.close(mine_) && there_.close(theirs_), "it doesn't close");
        return what;
    }
    // Fails work that no limiter knows.
    void fail_past_it() {
        try {
            fail_(*on_);
        } catch (const gpushare::error&) {
        }
    }

    bool by_submit(const work& w) {
        const auto t = here_.submit(mine_, *on_, w).value();
        (void)t.wait();
        return t.status() != errc::none;
    }
    bool by_callback(const work& w) {
        errc status = errc::stuck;
        const auto t =
            here_.submit(mine_, *on_, w, gpushare::no_options, [&](const auto& how) { status = how.status; }).value();
        (void)t.wait();
        while (status == errc::stuck) here_.poll();
        return status != errc::none;
    }
    bool by_request(const work& w) {
        gpushare::request r(here_, mine_);
        const auto t = r.submit(*on_, w).value();
        (void)t.wait();
        return t.status() != errc::none;
    }
    bool by_permit(const work& w) {
        return counted([&] { here_.acquire(mine_)->enqueue(*on_, w); });
    }
    bool by_enqueue(const work& w) {
        return counted([&] { (void)here_.enqueue(mine_, *on_, w); });
    }
    bool by_gang(const work& w) {
        return counted([&] {
            const std::array streams{on_, other_};
            members().enqueue(order_, streams, [&](std::size_t rank, Stream& s) { rank == 0 ? w(s) : good_(s); });
        });
    }
    bool by_nested_gang(const work& w) {
        return counted([&] {
            const std::array streams{on_, other_};
            members().enqueue(streams, [&] {
                good_(*other_);
                w(*on_);
            });
        });
    }
    bool by_chunks(const work& w) {
        const auto t = gpushare::submit_chunked(here_, mine_, *on_, 1, [&](Stream& s, std::size_t) { w(s); }).value();
        (void)t.wait();
        return t.status() != errc::none;
    }
    bool by_coroutine(const work& w) {
        errc status = errc::stuck;
        await(w, status);
        while (status == errc::stuck) here_.poll();
        return status != errc::none;
    }
    support::detached await(const work& w, errc& status) {
        const auto how = co_await gpushare::async_submit(here_, mine_, *on_, w);
        status = how.status;
    }

    // If no call reports the failure, the account shows it. A failure on the way to the device is
    // thrown as well.
    template <class F>
    bool counted(F enqueue) {
        const auto before = here_.usage(mine_).failed;
        try {
            enqueue();
        } catch (const gpushare::error&) {
        }
        while (here_.usage(mine_).in_flight != 0) (void)on_->record().wait(gpushare::never);
        return here_.usage(mine_).failed != before;
    }
    [[nodiscard]] gang members() { return gang::acquire({{&here_, mine_, {0}}, {&there_, theirs_, {1}}}).value(); }

    limiter here_, there_;
    Stream *on_, *other_;
    work fail_, good_;
    gpushare::detail::device_order_lock order_{2};
    gpushare::client_id mine_{}, theirs_{};
    std::vector<typename Stream::point> points_;
};

}  // namespace support::composition
