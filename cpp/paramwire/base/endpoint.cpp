#include "paramwire/base/endpoint.hpp"

#include "paramwire/base/text.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <charconv>
#include <sys/un.h>

namespace paramwire {

namespace {

constexpr std::string_view kTcpPrefix = "tcp://";
constexpr std::string_view kUnixPrefix = "unix:";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.' || c == '_'; }

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<Endpoint> parse() {
    if (text_.starts_with(kUnixPrefix)) return unix_path();
    if (text_.starts_with(kTcpPrefix)) at_ = kTcpPrefix.size();
    const std::string_view rest = text_.substr(at_);
    if (rest.empty()) return bad(at_, "a host is missing");
    if (rest.front() == '[') return bracketed();
    const auto colons = std::count(rest.begin(), rest.end(), ':');
    if (colons > 1) {  // a bare IPv6 address: no port can follow
      PARAMWIRE_CHECK(ipv6(at_, rest));
      return Endpoint::tcp(std::string(rest), kDefaultPort);
    }
    const std::size_t colon = rest.find(':');
    const std::string_view host = rest.substr(0, colon);
    PARAMWIRE_CHECK(name(host));
    if (colon == std::string_view::npos) return Endpoint::tcp(std::string(host), kDefaultPort);
    return with_port(host, at_ + colon + 1);
  }

 private:
  Error bad(std::size_t position, std::string_view why) const {
    return Error(Code::kInvalid, cat("address \"", text_, "\" is wrong at position ", position, ": ", why,
                                     "; write tcp://HOST:PORT, HOST:PORT, HOST, [IPV6]:PORT or unix:PATH"));
  }

  Result<Endpoint> unix_path() const {
    const std::string_view path = text_.substr(kUnixPrefix.size());
    if (path.empty()) return bad(kUnixPrefix.size(), "a path is missing");
    if (const auto nul = path.find('\0'); nul != std::string_view::npos) return bad(kUnixPrefix.size() + nul, "a path has no NUL");
    constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;  // unix(7)
    if (path.size() > kLongest) return bad(kUnixPrefix.size() + kLongest, cat("a socket path has at most ", kLongest, " bytes, this one ", path.size()));
    return Endpoint::unix_socket(std::string(path));
  }

  Result<Endpoint> bracketed() const {
    const std::size_t end = text_.find(']', at_);
    if (end == std::string_view::npos) return bad(text_.size(), "']' is missing");
    const std::string_view host = text_.substr(at_ + 1, end - at_ - 1);
    PARAMWIRE_CHECK(ipv6(at_ + 1, host));
    if (end + 1 == text_.size()) return Endpoint::tcp(std::string(host), kDefaultPort);
    if (text_[end + 1] != ':') return bad(end + 1, "':' and a port, or nothing, come after ']'");
    return with_port(host, end + 2);
  }

  Status ipv6(std::size_t position, std::string_view host) const {
    const std::size_t percent = host.find('%');
    const std::string address(host.substr(0, percent));
    in6_addr out{};
    if (inet_pton(AF_INET6, address.c_str(), &out) != 1) return bad(position, "not an IPv6 address");
    if (percent != std::string_view::npos && percent + 1 == host.size()) return bad(position + host.size(), "an interface name is missing after '%'");
    return {};
  }

  Status name(std::string_view host) const {
    if (host.empty()) return bad(at_, "a host is missing");
    for (std::size_t i = 0; i < host.size(); ++i) {
      if (!is_name_char(host[i])) return bad(at_ + i, "a host name has letters, digits, '-', '.' and '_'");
    }
    // Digits and dots alone are meant as an address; inet_aton's short forms ("1.2.3" = 1.2.0.3) surprise more than they help.
    if (std::all_of(host.begin(), host.end(), [](char c) { return is_digit(c) || c == '.'; })) {
      in_addr out{};
      if (inet_pton(AF_INET, std::string(host).c_str(), &out) != 1) return bad(at_ + host.size(), "an IPv4 address has four numbers of 0 to 255");
    }
    return {};
  }

  Result<Endpoint> with_port(std::string_view host, std::size_t position) const {
    const std::string_view digits = text_.substr(position);
    if (digits.empty()) return bad(position, "a port is missing");
    unsigned port = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (error == std::errc::invalid_argument || end != digits.data() + digits.size()) {
      return bad(position + static_cast<std::size_t>(end - digits.data()), "a port is a number");
    }
    if (error != std::errc() || port > 65535) return bad(position, "a port is at most 65535");
    return Endpoint::tcp(std::string(host), static_cast<std::uint16_t>(port));
  }

  std::string_view text_;
  std::size_t at_ = 0;  // of the host
};

}  // namespace

std::string Endpoint::to_string() const {
  if (kind == Kind::kUnix) return cat(kUnixPrefix, path);
  if (host.find(':') != std::string::npos) return cat(kTcpPrefix, '[', host, "]:", port);
  return cat(kTcpPrefix, host, ':', port);
}

Result<Endpoint> parse_endpoint(std::string_view text) { return Parser(text).parse(); }

}  // namespace paramwire
