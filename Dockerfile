# The image of the CSI driver. Its binary is static, so the image holds that one file: no shell and no
# library that could age. `make image` builds the binaries first and then, offline, the image.
FROM scratch

ARG TARGETARCH
ARG VERSION=dev
ARG REVISION=unknown

LABEL org.opencontainers.image.title="hostpath-csi-driver" \
      org.opencontainers.image.description="CSI driver for directory volumes on a Kubernetes node's own storage" \
      org.opencontainers.image.url="https://github.com/kubevirt/hostpath-provisioner" \
      org.opencontainers.image.source="https://github.com/kubevirt/hostpath-provisioner" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

COPY bin/linux_${TARGETARCH}/hostpath-csi-driver /hostpath-csi-driver

# Root, because it mounts and writes into the pools; the DaemonSet grants the rest.
USER 0:0

ENTRYPOINT ["/hostpath-csi-driver"]
