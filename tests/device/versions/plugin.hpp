// SPDX-License-Identifier: Apache-2.0
// The description that a plug-in gives of itself.
#pragma once

struct plugin_facts {
    int major_version;
    const void* version;   // address of gpushare::version
    const void* function;  // address of a function with a type of the library in its signature
    bool works;
};

extern "C" plugin_facts plugin_entry();
