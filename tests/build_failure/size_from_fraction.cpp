// SPDX-License-Identifier: Apache-2.0
// must fail: conversion from 'double' to 'std::size_t'
// A program that asks for warnings of conversions gets them for sizes, at its own call.
#include <gpushare/units.hpp>

#pragma GCC diagnostic error "-Wfloat-conversion"

void* allocate(gpushare::byte_count size);

void* half(double all) { return allocate(all / 2); }
