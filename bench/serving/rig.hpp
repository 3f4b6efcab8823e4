// SPDX-License-Identifier: Apache-2.0
// Runs the engines beside each other: behind a limiter, with each call as one block on the host
// device, or on plain threads.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/units.hpp>

#include "serving/engines.hpp"

namespace bench::serving {

/// Tags in the ledger: the voice detector, which has priority; the reader of pages; the language
/// model or its stand-in.
enum who : std::uint32_t { detector, reader, writer };
inline constexpr std::uint32_t tenants = 3;

/// The engines of all tenants. Readers and writers have two engines each, so that each tenant can
/// fill two SMs.
struct crew {
    explicit crew(bool with_language_model);

    std::unique_ptr<engine> detector;
    std::array<std::unique_ptr<engine>, 2> readers, writers;
    std::array<gpushare::ns, tenants> alone{};  ///< time of a call without neighbours
    gpushare::ns stretch{};  ///< a reader's call that yields does so at least this often: twice the longest part alone
};

/// The setup of a run.
struct plan {
    std::uint32_t cores = 2;               ///< SMs
    std::size_t readers = 2, writers = 2;  ///< engines, with a thread each
    std::size_t ahead = 4;                 ///< calls that each reader or writer thread keeps submitted
    /// A writer's thread submits a call and waits for the result.
    bool decode_loop = false;
    bool keeps_sm = false;  ///< the detector's level keeps an SM (client_settings::keeps)
    /// The pages yield between their lines, and the limiter knows how often.
    bool yields = false;
    /// The detector gets calls at random, 100 a second (Poisson).
    bool detects = true;
    /// Warm-up, in which the limiter learns the engines' times.
    std::chrono::milliseconds before{800};
    std::chrono::milliseconds window{7000};  ///< the time that counts
};

/// A call of the detector.
struct detection {
    gpushare::instant due{};          ///< arrival of the call
    gpushare::instant handed_over{};  ///< time at which the thread has submitted the call
    gpushare::instant done{};         ///< time of the answer
    /// The bound on the wait for other tenants, published at the submission; 0: none.
    gpushare::ns bound{};
    /// By the ledger: from the submission, or the end of the previous call, to the start on an SM.
    gpushare::ns waited{};
};

/// The results of a run.
struct outcome {
    std::vector<gpushare::host::block_record> calls;  ///< of all tenants from the start, by the ledger
    std::vector<gpushare::host::block_record> whole;  ///< the same calls, each from its start to its end
    gpushare::instant from{}, to{};                   ///< the window
    std::vector<detection> detections;                ///< calls that arrived in the window
    std::array<gpushare::ns, tenants> charged{};      ///< from the start to the end
    double cores = 0;                                 ///< cores that the process used in the window

    /// Calls per second of a tenant in the window. A call that lies partly in the window counts
    /// partly.
    [[nodiscard]] double rate(who tenant) const;
    /// SM time of a tenant in the window, in seconds.
    [[nodiscard]] double busy(who tenant) const;
    /// SM time of a tenant from the start to the end.
    [[nodiscard]] gpushare::ns used(who tenant) const;
    /// A quantile of the time from a call's arrival to its answer, in milliseconds.
    [[nodiscard]] double detector_ms(double quantile) const;
};

/// Runs behind a limiter with default options. Reader and writer have shares of 30 and 70 %, and
/// the detector is one level above.
[[nodiscard]] outcome limited(crew& c, const plan& p);
/// Runs on plain threads that the operating system schedules, on the cores of this process.
[[nodiscard]] outcome on_plain_threads(crew& c, const plan& p);

/// The CPU time for submitting a detector's call and waiting for it, beyond a plain launch and a
/// wait for its point, in percent of the call.
[[nodiscard]] double submit_cost_percent(crew& c, std::size_t ahead);

}  // namespace bench::serving
