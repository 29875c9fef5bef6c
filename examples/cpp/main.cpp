// Serves one tensor from this process, fetches rows of it over the best transport there is, and checks what came.
#include "paramwire/client/client.hpp"
#include "paramwire/server/server.hpp"

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

namespace {

paramwire::Status serve_and_fetch(const std::string& unix_directory) {
  std::vector<float> weight(1024 * 64);
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i);

  paramwire::ServerOptions options;
  options.unix_directory = unix_directory;  // for the shm transport; TCP on loopback is there anyway
  PARAMWIRE_TRY(server, paramwire::Server::open(options));
  PARAMWIRE_TRY(publish, server->publish());
  PARAMWIRE_CHECK(publish.put({.tensor = "w", .dtype = paramwire::DType::kF32, .shape = {1024, 64}, .shard = {}}, std::as_bytes(std::span(weight))));
  PARAMWIRE_CHECK(publish.finish());

  PARAMWIRE_TRY(client, paramwire::Client::connect(server->endpoints().front().to_string(), {}));
  PARAMWIRE_TRY(snapshot, client->snapshot({}));
  std::vector<float> rows(16 * 64);
  paramwire::FetchRequest want;
  want.tensor = "w";
  want.part = paramwire::Shard::rows(100, 116);
  want.target = std::as_writable_bytes(std::span(rows));
  PARAMWIRE_CHECK(snapshot->fetch(std::span(&want, 1)));

  std::cout << "rows 100 to 116 of w at version " << snapshot->version().to_string() << " over " << client->stats().transport << ": " << rows.front() << " to "
            << rows.back() << "\n";
  if (rows.front() != 6400.0F || rows.back() != 7423.0F) return paramwire::Error(paramwire::Code::kInternal, "these are not the rows that were published");
  return {};
}

}  // namespace

int main() {
  std::string directory = (std::filesystem::temp_directory_path() / "paramwire-example-XXXXXX").string();
  if (mkdtemp(directory.data()) == nullptr) {
    std::cerr << "no temporary directory\n";
    return 1;
  }
  const auto status = serve_and_fetch(directory);
  std::filesystem::remove_all(directory);
  if (!status.ok()) {
    std::cerr << status.error().to_string() << "\n";
    return 1;
  }
  return 0;
}
