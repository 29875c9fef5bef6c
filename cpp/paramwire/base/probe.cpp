#include "paramwire/base/probe.hpp"

#include <algorithm>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <sys/utsname.h>
#include <system_error>

namespace paramwire {

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> out;
  std::error_code error;
  // Not a range-for: its increment throws.
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) out.push_back(at->path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool file_mentions(const std::string& path, std::string_view text) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.find(text) != std::string::npos) return true;
  }
  return false;
}

std::string distribution(const std::string& root) {
  std::ifstream file(root + "/etc/os-release");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("ID=")) continue;
    std::string id = line.substr(3);
    std::erase(id, '"');
    return id;
  }
  return {};
}

std::string kernel_release() {
  utsname names{};
  return ::uname(&names) == 0 ? names.release : "unknown";
}

std::string library_problem(const char* name) {
  void* library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* words = ::dlerror();
    return words != nullptr ? words : "dlopen failed";
  }
  ::dlclose(library);
  return {};
}

}  // namespace paramwire
