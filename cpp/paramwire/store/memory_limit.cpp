#include "paramwire/store/memory_limit.hpp"

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

// Applies the limit of one cgroup directory and of those above it: a parent's limit binds its children.
void apply_cgroup(const std::string& root, std::string path, const char* limit_file, const char* usage_file, MemoryLimit& out) {
  for (;;) {
    const std::string directory = root + (path == "/" ? "" : path);
    const auto limit = read_number(directory + "/" + limit_file);
    const auto usage = read_number(directory + "/" + usage_file);
    if (limit && usage) {
      const std::uint64_t available = *limit > *usage ? *limit - *usage : 0;
      if (available < out.available_bytes) out = {available, *limit, directory + "/" + limit_file};
    }
    if (path.empty() || path == "/") return;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

MemoryLimit memory_limit() {
  MemoryLimit out{~std::uint64_t{0}, ~std::uint64_t{0}, "none"};
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  std::uint64_t kib = 0, total = 0;
  while (meminfo >> key >> kib && std::getline(meminfo, unit)) {
    if (key == "MemTotal:") total = kib * 1024;
    if (key == "MemAvailable:") out = {kib * 1024, total, "MemAvailable"};
  }
  std::ifstream cgroups("/proc/self/cgroup");  // lines "id:controllers:path"
  for (std::string line; std::getline(cgroups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      apply_cgroup("/sys/fs/cgroup", path, "memory.max", "memory.current", out);
      apply_cgroup("/sys/fs/cgroup/unified", path, "memory.max", "memory.current", out);
    } else if (controllers.find("memory") != std::string::npos) {
      apply_cgroup("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", out);
    }
  }
  return out;
}

}  // namespace paramwire
