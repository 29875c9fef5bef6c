// Pin tables: one page-aligned array of 64-bit words per client process, made by the server, mapped by both.
//
// A word is 0 (free) or pin_word(locator) of a slot whose bytes that process looks at. All links of a process share its table:
// a word is claimed by compare-and-set. Hostile in content: the server only ever compares words. No locks, no pointers.
#pragma once

#include <cstdint>

namespace paramwire {

// Views that one client process can hold at once: 8192 words are 64 KiB a client. A scan reads all words of all clients
// (8 us a client), so more would make every publish slower.
inline constexpr std::uint32_t kPinCapacity = 8192;

}  // namespace paramwire
