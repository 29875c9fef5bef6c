#include "paramwire/store/memory_limit.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace paramwire {

namespace {

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  if (!(file >> text)) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;  // "max": no limit
  return value;
}

std::uint64_t read_field(const std::string& path, std::string_view field) {
  std::ifstream file(path);
  std::string key;
  std::uint64_t value = 0;
  while (file >> key >> value) {
    if (key == field) return value;
  }
  return 0;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* cache;  // field of memory.stat, descendants included
};
constexpr CgroupFiles kV2 = {"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

// Applies the limit of one cgroup directory and of those above it: a parent's limit binds its children.
void apply_cgroup(const std::string& root, std::string path, const CgroupFiles& files, MemoryLimit& out) {
  for (;;) {
    const std::string directory = root + (path == "/" ? "" : path);
    const auto limit = read_number(directory + "/" + files.limit);
    const auto usage = read_number(directory + "/" + files.usage);
    if (limit && usage) {
      const std::uint64_t cache = std::min(*usage, read_field(directory + "/memory.stat", files.cache));
      const std::uint64_t taken = *usage - cache;
      const std::uint64_t available = *limit > taken ? *limit - taken : 0;
      if (available < out.available_bytes) out = {available, *limit, directory + "/" + files.limit};
    }
    if (path.empty() || path == "/" || path.find('/') == std::string::npos) return;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

MemoryLimit memory_limit(const std::string& root) {
  MemoryLimit out{~std::uint64_t{0}, ~std::uint64_t{0}, "none"};
  std::ifstream meminfo(root + "proc/meminfo");
  std::string key, unit;
  std::uint64_t kib = 0, total = 0;
  while (meminfo >> key >> kib && std::getline(meminfo, unit)) {
    if (key == "MemTotal:") total = kib * 1024;
    if (key == "MemAvailable:") out = {kib * 1024, total, "MemAvailable"};
  }
  std::ifstream cgroups(root + "proc/self/cgroup");  // lines "id:controllers:path"
  for (std::string line; std::getline(cgroups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      apply_cgroup(root + "sys/fs/cgroup", path, kV2, out);
      apply_cgroup(root + "sys/fs/cgroup/unified", path, kV2, out);
    } else if (controllers.find("memory") != std::string::npos) {
      apply_cgroup(root + "sys/fs/cgroup/memory", path, kV1, out);
    }
  }
  return out;
}

}  // namespace paramwire
