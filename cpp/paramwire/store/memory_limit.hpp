// How much memory this process may still take: the smallest of the machine's available memory and the limits of its
// control groups, v2 or v1. Sources: cgroups(7), proc_meminfo(5), kernel Documentation/admin-guide/cgroup-v2.rst.
#pragma once

#include <cstdint>
#include <string>

namespace paramwire {

struct MemoryLimit {
  std::uint64_t available_bytes = 0;  // now
  std::uint64_t limit_bytes = 0;      // of whatever bounds it
  std::string source;                 // "MemAvailable" or the cgroup file that holds the limit
};

// Reads /proc and /sys at every call: a few tens of microseconds. Any thread. A limit that can't be read is no limit.
// Page cache that the kernel would drop for us (inactive_file of memory.stat) counts as available: a server that has just
// read its model from files is charged for them.
// `root`: where proc/ and sys/ are, for tests.
MemoryLimit memory_limit(const std::string& root = "/");

}  // namespace paramwire
