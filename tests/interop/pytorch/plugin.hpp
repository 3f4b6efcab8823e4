// SPDX-License-Identifier: Apache-2.0
// The C functions of plugin.cpp.
#pragma once

#include <cstdint>

#include <sys/types.h>

#include "host/gate.hpp"

struct native_stream;

extern "C" {
void* chat_malloc(ssize_t size, int device, native_stream* stream);
void chat_free(void* p, ssize_t size, int device, native_stream* stream);
void chat_record_stream(void* p, native_stream* stream);
void* chat_try_malloc(ssize_t size, int device, native_stream* stream);  // for a MemPool
void* batch_malloc(ssize_t size, int device, native_stream* stream);
void batch_free(void* p, ssize_t size, int device, native_stream* stream);

void start();
void stop();
native_stream* make_stream(int device);
void destroy_stream(native_stream* s);
void occupy(native_stream* s, gate* until);
void synchronize(native_stream* s);
std::uint64_t chat_charged(int device);   // bytes, of reached frees none
std::uint64_t batch_charged(int device);  // what its pool holds
std::uint64_t batch_used(int device);     // of that, what is out
int wrong_frees();
std::uint64_t unfreed();
}
