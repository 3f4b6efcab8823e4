// SPDX-License-Identifier: Apache-2.0
// Loads plug-ins into one process and one symbol space. Those built against different versions of
// the library share nothing and work side by side; those of one version share its symbols, which
// shows that sharing would be noticed.
//
//   versions THIS_VERSION.so OTHER_VERSION.so THIS_VERSION_AGAIN.so
#include <dlfcn.h>

#include <cstdio>

#include "plugin.hpp"

namespace {

bool load(const char* path, plugin_facts& facts) {
    // RTLD_GLOBAL: what one defines, the next one's references would find.
    void* const handle = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) {
        std::printf("%s\n", dlerror());
        return false;
    }
    const auto entry = reinterpret_cast<plugin_facts (*)()>(dlsym(handle, "plugin_entry"));
    if (entry == nullptr) return false;
    facts = entry();
    std::printf("%s: major version %d, %s\n", path, facts.major_version, facts.works ? "works" : "doesn't work");
    return facts.works;
}

}  // namespace

int main(int argc, char** argv) {
    plugin_facts ours{}, other{}, again{};
    if (argc != 4 || !load(argv[1], ours) || !load(argv[2], other) || !load(argv[3], again)) return 1;
    const bool apart =
        ours.major_version != other.major_version && ours.version != other.version && ours.function != other.function;
    const bool shared = ours.version == again.version && ours.function == again.function;
    std::printf("different versions %s; the same version %s\n", apart ? "keep apart" : "get mixed up",
                shared ? "is shared" : "isn't shared");
    return apart && shared ? 0 : 1;
}
