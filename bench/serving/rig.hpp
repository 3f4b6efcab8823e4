// SPDX-License-Identifier: Apache-2.0
// The engines beside each other: behind a limiter, each call one block on the host device, or on
// plain threads.
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

/// Tags in the ledger: the voice detector, which goes before the others; the reader of pages; the
/// language model, or who stands in for it.
enum who : std::uint32_t { detector, reader, writer };
inline constexpr std::uint32_t tenants = 3;

/// The engines of all tenants: two of each of the others, so that each can fill two SMs.
struct crew {
    explicit crew(bool with_language_model);

    std::unique_ptr<engine> detector;
    std::array<std::unique_ptr<engine>, 2> readers, writers;
    std::array<gpushare::ns, tenants> alone{};  ///< what a call takes with nobody beside
    gpushare::ns stretch{};  ///< a reader's call that yields does so at least this often: twice the longest part alone
};

/// What runs.
struct plan {
    std::uint32_t cores = 2;               ///< SMs
    std::size_t readers = 2, writers = 2;  ///< engines, each with a thread
    std::size_t ahead = 4;                 ///< calls that a reader's and a writer's thread has handed over
    bool decode_loop = false;              ///< a writer's thread submits a call and waits for it
    bool keeps_sm = false;                 ///< the detector's level keeps an SM (client_settings::keeps)
    /// A page yields between its lines, and says how often. An SM that is kept is lent to that, and
    /// to tokens.
    bool yields = false;
    bool detects = true;                     ///< calls of the detector come, Poisson, 100 a second
    std::chrono::milliseconds before{800};   ///< until all know each other
    std::chrono::milliseconds window{7000};  ///< that is looked at
};

/// A call of the detector.
struct detection {
    gpushare::instant due{};          ///< when it came
    gpushare::instant handed_over{};  ///< when its thread had it handed over
    gpushare::instant done{};         ///< when its answer was there
    gpushare::ns bound{};             ///< on its wait for others, as published when it was handed over; 0: none
    gpushare::ns waited{};  ///< by the ledger, from then on or from the end of the call before, until it had an SM
};

/// What came of it.
struct outcome {
    std::vector<gpushare::host::block_record> calls;  ///< of all tenants, from the beginning, by the ledger
    std::vector<gpushare::host::block_record> whole;  ///< the same from when each began until it was over
    gpushare::instant from{}, to{};                   ///< the window
    std::vector<detection> detections;                ///< due in the window
    std::array<gpushare::ns, tenants> charged{};      ///< from the beginning to the end
    double cores = 0;                                 ///< what the process took in the window

    /// Calls of a tenant in the window, parts of calls counted as parts, per second.
    [[nodiscard]] double rate(who tenant) const;
    /// SM time of a tenant in the window, in seconds.
    [[nodiscard]] double busy(who tenant) const;
    /// SM time of a tenant from the beginning to the end.
    [[nodiscard]] gpushare::ns used(who tenant) const;
    /// From when a call was due until it was done, ms.
    [[nodiscard]] double detector_ms(double quantile) const;
};

/// Behind a limiter with its default options: reader and writer have 30 and 70 %, the detector has
/// the level above.
[[nodiscard]] outcome limited(crew& c, const plan& p);
/// By the operating system alone, on the cores that the process has.
[[nodiscard]] outcome on_plain_threads(crew& c, const plan& p);

/// What submitting and waiting for a detector's call takes of the processor, beyond launching it
/// and waiting for the point behind, in percent of the call.
[[nodiscard]] double submit_cost_percent(crew& c, std::size_t ahead);

}  // namespace bench::serving
