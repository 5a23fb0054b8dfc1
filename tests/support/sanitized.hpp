// Whether this build has a sanitizer. Its tests are ten to twenty times slower: those that take
// long look at a part of what the plain build looks at, for faults of memory and threads alone.
#pragma once

namespace kvx::tests {

#if defined(__has_feature)
constexpr bool kIsSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kIsSanitized = false;
#endif

}  // namespace kvx::tests
