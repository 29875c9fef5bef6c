#include "paramwire/control/version_clock.hpp"

#include "paramwire/base/text.hpp"

namespace paramwire {

Status VersionClock::commit(const std::optional<Version>& base, Version next, const Root& root) {
  if (base != newest_) {
    return Error(Code::kStale, cat("commit of ", next, " on base ", to_text(base), ": the newest version is ", to_text(newest_)));
  }
  if (!next.valid() || (newest_ && next <= *newest_)) {
    return Error(Code::kInvalid, cat("commit of version ", next, ", which is not above ", to_text(newest_)));
  }
  newest_ = next;
  root_ = root;
  return {};
}

}  // namespace paramwire
