// SPDX-License-Identifier: Apache-2.0
// Tenants for a program in Python: torch_scope behind C functions, which gpushare_torch.py calls.
// Names, texts and problems are in UTF-8. A function that fails answers -1 or null, and
// tenants_problem() says why.
#pragma once

#include <cstdint>

extern "C" {
/// Of which libtorch the library is made, such as "2.11". Another one has other classes.
const char* tenants_torch() noexcept;
/// Admits tenants on the device of that number, by a text as parse_specifications() takes it. Once,
/// before a thread works in one; PyTorch is initialised on the device.
int tenants_start(int device, const char* text) noexcept;
/// The calling thread is inside until it calls tenants_leave() itself, for the last one first.
void* tenants_enter(const char* name) noexcept;
void tenants_leave(void* inside) noexcept;
/// Bytes of the tenant's memory that tensors have; and how often a tensor was refused. -1 as a
/// number: there is no such tenant.
std::uint64_t tenants_used(const char* name) noexcept;
std::uint64_t tenants_refused(const char* name) noexcept;
/// Keeps no memory for the next tensor.
void tenants_give_back() noexcept;
/// Behind all tensors and threads. A program that ends needn't call it.
void tenants_stop() noexcept;
/// Of the calling thread's last failure, until its next one.
const char* tenants_problem() noexcept;
}
