// SPDX-License-Identifier: Apache-2.0
// Tenants for a program in Python: torch_scope behind C functions, which gpushare_torch.py calls.
// Names, texts and problems are in UTF-8. A function that fails returns -1 or null, and
// tenants_problem() gives the reason.
#pragma once

#include <cstdint>

extern "C" {
/// The libtorch for which the library was built, such as "2.11". Other versions have different
/// classes.
const char* tenants_torch() noexcept;
/// Admits tenants on the device of that number, from a text for parse_specifications(). Call this
/// once, before a thread works in a tenant and after PyTorch is initialised on the device.
int tenants_start(int device, const char* text) noexcept;
/// Puts the calling thread into the tenant's scope until it calls tenants_leave(). A thread leaves
/// the scope that it entered last first.
void* tenants_enter(const char* name) noexcept;
void tenants_leave(void* inside) noexcept;
/// The bytes of the tenant's memory that tensors have, and how often a tensor was refused. The
/// number -1 means that there is no such tenant.
std::uint64_t tenants_used(const char* name) noexcept;
std::uint64_t tenants_refused(const char* name) noexcept;
/// Gives back the memory that is kept for the next tensor.
void tenants_give_back() noexcept;
/// Call this after all tensors and threads are gone. A program that ends needn't call it.
void tenants_stop() noexcept;
/// The reason for the calling thread's last failure, valid until its next failure.
const char* tenants_problem() noexcept;
}
