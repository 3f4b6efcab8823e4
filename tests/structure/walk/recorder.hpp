// SPDX-License-Identifier: Apache-2.0
// Records which functions the calling thread enters and leaves, in a program compiled with
// -finstrument-functions:
//
//   walk::begin();    chat.submit(work).wait();    walk::pause();    return walk::write("calls");
//
// The file has a line for each: `+address` or `-address`, and `=` where a walk begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace walk {

struct entry {
    const void* function;
    char what;  // '+': entered, '-': left
};

// Enough for hundreds of submissions. Entries beyond it are counted, and make write() fail.
inline constexpr std::size_t room = 1 << 20;

inline thread_local bool on = false;
inline std::vector<entry> entries;
inline std::size_t lost = 0;

[[gnu::no_instrument_function]] inline void note(const void* function, char what) noexcept {
    if (!on) return;
    on = false;  // not what this calls
    if (entries.size() < entries.capacity())
        entries.push_back({function, what});
    else
        ++lost;
    on = true;
}

/// Another walk begins, on this thread.
[[gnu::no_instrument_function]] inline void begin() {
    entries.reserve(room);
    entries.push_back({nullptr, '='});
    on = true;
}
[[gnu::no_instrument_function]] inline void go_on() noexcept { on = true; }
[[gnu::no_instrument_function]] inline void pause() noexcept { on = false; }

/// What main() returns: 0 if all was recorded and written.
[[gnu::no_instrument_function]] inline int write(const char* path) {
    std::FILE* const out = std::fopen(path, "w");
    if (out == nullptr) return 1;
    for (const auto& e : entries) std::fprintf(out, "%c%zx\n", e.what, reinterpret_cast<std::uintptr_t>(e.function));
    return std::fclose(out) == 0 && lost == 0 ? 0 : 1;
}

}  // namespace walk

extern "C" {
[[gnu::no_instrument_function]] void __cyg_profile_func_enter(void* function, void* site);
[[gnu::no_instrument_function]] void __cyg_profile_func_exit(void* function, void* site);
}
void __cyg_profile_func_enter(void* function, void*) { walk::note(function, '+'); }
void __cyg_profile_func_exit(void* function, void*) { walk::note(function, '-'); }
