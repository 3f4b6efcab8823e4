// SPDX-License-Identifier: Apache-2.0
// The peers of our all-reduce, each with its best settings: every MPI on this machine with several
// algorithms and core bindings, and Gloo with its algorithms.
//
//   mpi_peers mpi(2);                 // a look at all of them, once
//   const auto us = mpi.sweep();      // at each size the best of those that are worth it
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

class mpi_peers {
public:
    /// Tries every setting of every MPI once and prints each failure with its reason. Keeps a few
    /// settings that together are within 5 % of the best time at every size.
    explicit mpi_peers(unsigned ranks);

    /// Times of bench::sweep in microseconds: at each size, the time of the fastest kept setting.
    /// Empty without an MPI.
    [[nodiscard]] std::vector<double> sweep() const;
    /// Names the kept settings: "Open MPI v4.1.4: ring, by single copies; MPICH Version 5.0.2:
    /// default". "By single copies" means that the ranks read or wrote each other's memory
    /// directly, by their own counters. Other settings copy large messages twice.
    [[nodiscard]] std::string kept() const;

private:
    struct setting {
        std::string name;     // "ring"
        std::string command;  // without the peer's arguments
        std::string version;  // as the library reports it
        bool single_copies = false;
    };
    struct outcome {
        std::vector<double> us;  // empty after a failure
        std::string version, trouble;
        std::size_t single_copies = 0;
        std::size_t wrong = 0;  // number of wrong elements
    };
    static std::vector<setting> all_settings(unsigned ranks);
    static outcome run(const setting& s, unsigned fewer);

    std::vector<setting> kept_;
};

/// The same for Gloo over TCP on the loopback interface: at each size, the time of the fastest
/// algorithm.
std::vector<double> gloo_tcp(unsigned ranks);
/// "0.0~git...: ring, bcube"; empty if Gloo isn't installed.
std::string gloo_settings();

}  // namespace bench
