// Errors as values: Code (what to do next), Error (code and text), Result<T> and Status.
//
// A code is named by the caller's remedy, not by the layer that failed. The text names the object, the peer, the limit,
// the number and the next step; the first place that knows the cause writes it, nobody above repeats it.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace paramwire {

// Values travel in ERROR frames (wire/FORMAT.md) and map one to one onto Python classes: never renumber.
enum class Code : std::uint8_t {
  kInvalid = 1,       // fix the call
  kNotFound = 2,      // ask elsewhere, or for another name
  kStale = 3,         // the version asked for is gone, or not there yet: take a newer snapshot, or wait
  kCorrupt = 4,       // bytes failed their check: read another replica
  kBackpressure = 5,  // a named limit is reached: slow down, or raise it
  kTimeout = 6,       // the deadline passed: the peer may be frozen, reroute
  kUnreachable = 7,   // the peer is gone: reroute or reconnect
  kUnavailable = 8,   // this implementation cannot work here: choose another
  kInternal = 9,      // a broken invariant: report a bug
  kDenied = 10,       // the right key is missing: bring it, or mend its file
};

// Lower-case word for a code ("stale"), the same in logs, CLI and docs. "unknown" for a value outside the table.
std::string_view code_name(Code code) noexcept;

class [[nodiscard]] Error {
 public:
  Error(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  Code code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }
  // "stale: version 1.7 of block ... is gone".
  std::string to_string() const;

 private:
  Code code_;
  std::string message_;
};

// A T or an Error. Like std::expected, which GCC 12 lacks.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit on purpose
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }

  T& value() & { assert(ok()); return *std::get_if<0>(&state_); }
  const T& value() const& { assert(ok()); return *std::get_if<0>(&state_); }
  T&& value() && { assert(ok()); return std::move(*std::get_if<0>(&state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const& { assert(!ok()); return *std::get_if<1>(&state_); }
  Error&& error() && { assert(!ok()); return std::move(*std::get_if<1>(&state_)); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT

  bool ok() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return ok(); }
  const Error& error() const& { assert(!ok()); return *error_; }
  Error&& error() && { assert(!ok()); return std::move(*error_); }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

// Error with the errno text appended: "bind 127.0.0.1:7000: Address already in use (errno 98)".
Error errno_error(Code code, std::string_view what, int error_number);

}  // namespace paramwire

// `PARAMWIRE_TRY(name, expression)`: declare `name` as the value, or return the error from this function.
#define PARAMWIRE_CONCAT_(a, b) a##b
#define PARAMWIRE_CONCAT(a, b) PARAMWIRE_CONCAT_(a, b)
#define PARAMWIRE_TRY_IMPL_(tmp, name, expression)        \
  auto tmp = (expression);                                \
  if (!tmp.ok()) return std::move(tmp).error();           \
  auto name = std::move(tmp).value()
#define PARAMWIRE_TRY(name, expression) PARAMWIRE_TRY_IMPL_(PARAMWIRE_CONCAT(pw_try_, __LINE__), name, expression)
// `PARAMWIRE_CHECK(expression)`: return the error of a Status (or drop the value of a Result) from this function.
#define PARAMWIRE_CHECK(expression)                                     \
  do {                                                                  \
    if (auto pw_status = (expression); !pw_status.ok()) {               \
      return std::move(pw_status).error();                              \
    }                                                                   \
  } while (false)
