// Looks at the machine for Availability lines. Reads files of /proc, /sys and /etc, and asks the loader for libraries; changes nothing.
//
// `root` stands before every path: empty for this machine, a folder with such files for tests. Any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace paramwire {

// Names in a folder, sorted; none where there is no such folder.
std::vector<std::string> names_in(const std::string& folder);
bool exists(const std::string& path);
// The first line without its end; empty when the file can't be read.
std::string first_line(const std::string& path);
// Whether some line of the file contains `text`.
bool file_mentions(const std::string& path, std::string_view text);
// ID of /etc/os-release: "debian", "ubuntu", "fedora", ...; empty when unknown.
std::string distribution(const std::string& root);
// Of the running kernel, as uname -r prints it.
std::string kernel_release();
// Empty when the loader opens `name` ("libcuda.so.1"), else its words. Closed again at once.
std::string library_problem(const char* name);

}  // namespace paramwire
