/*
 * Loops that the compiler turns into vector instructions, compiled once for each kind of processor and chosen when the
 * library is loaded. They compute with integers only, so that the answer does not depend on which one is chosen.
 */
#ifndef CRN_VECTOR_H
#define CRN_VECTOR_H

#include <limits.h> /* tells __GLIBC__ */

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define CRN_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CRN_SANITIZED 1
#endif

/* Choosing at load time needs the indirect functions of glibc, which run too early for sanitizers. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(CRN_SANITIZED)
#define CRN_VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CRN_VECTOR
#endif

#endif
