#include "paramwire/base/error.hpp"

#include "paramwire/base/text.hpp"

#include <system_error>

namespace paramwire {

std::string_view code_name(Code code) noexcept {
  switch (code) {
    case Code::kInvalid: return "invalid";
    case Code::kNotFound: return "not found";
    case Code::kStale: return "stale";
    case Code::kCorrupt: return "corrupt";
    case Code::kBackpressure: return "backpressure";
    case Code::kTimeout: return "timeout";
    case Code::kUnreachable: return "unreachable";
    case Code::kUnavailable: return "unavailable";
    case Code::kInternal: return "internal";
    case Code::kDenied: return "denied";
  }
  return "unknown";
}

std::string Error::to_string() const { return cat(code_name(code_), ": ", message_); }

Error errno_error(Code code, std::string_view what, int error_number) {
  return Error(code, cat(what, ": ", std::generic_category().message(error_number), " (errno ", error_number, ")"));
}

}  // namespace paramwire
