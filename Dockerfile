# Thunder with its embedded PostgreSQL.
#
#   docker build -t thunder .
#   docker run -p 127.0.0.1:6767:6767 -v thunder:/var/lib/thunder -e THUNDER_API_KEY=secret thunder
FROM rust:1-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends clang cmake libclang-dev python3 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN .ci/release && mkdir /opt/thunder && tar -xzf target/dist/thunder-*.tar.gz --strip-components=1 -C /opt/thunder

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libstdc++6 postgresql python3-numpy \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --home-dir /var/lib/thunder --create-home --shell /usr/sbin/nologin thunder
COPY --from=build /opt/thunder /opt/thunder
RUN ln -s /opt/thunder/thunder /usr/local/bin/thunder
USER thunder
ENV THUNDER_DATA_DIR=/var/lib/thunder
VOLUME /var/lib/thunder
EXPOSE 6767
# The server also answers other containers, so it refuses to start without THUNDER_API_KEY or a key file.
ENV THUNDER_LISTEN=0.0.0.0:6767
# Reads address, prefix and certificate from the environment and the configuration file. The start may download a model.
HEALTHCHECK --start-period=1h --interval=15s --timeout=5s CMD ["thunder", "doctor", "--running"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["thunder"]
CMD ["serve"]
