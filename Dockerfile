# The images of the programs, a stage for each; `make image` builds the binaries first. A program is static. What it
# executes is taken out of Debian's packages by test/cmd/image, with the libraries that it needs: there is no shell and no
# package manager in an image. `make image` checks that.
FROM scratch AS base

ARG VERSION=dev
ARG REVISION=unknown
ARG REPOSITORY=https://github.com/kubevirt/hostpath-provisioner

LABEL org.opencontainers.image.url="${REPOSITORY}" \
      org.opencontainers.image.source="${REPOSITORY}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# Root, because all of them mount, write into pools or open devices; the manifests grant the rest. One that does not
# sets another user.
USER 0:0

FROM base AS hostpath-csi-driver
ARG TARGETARCH
LABEL org.opencontainers.image.title="hostpath-csi-driver" \
      org.opencontainers.image.description="CSI driver for directory volumes on a Kubernetes node's own storage"
COPY bin/linux_${TARGETARCH}/hostpath-csi-driver /hostpath-csi-driver
ENTRYPOINT ["/hostpath-csi-driver"]

FROM base AS hostpath-provisioner
ARG TARGETARCH
LABEL org.opencontainers.image.title="hostpath-provisioner" \
      org.opencontainers.image.description="hostPath PersistentVolumes from directories of a Kubernetes node"
COPY bin/linux_${TARGETARCH}/hostpath-provisioner /hostpath-provisioner
ENTRYPOINT ["/hostpath-provisioner"]

FROM base AS local-pv-provisioner
ARG TARGETARCH
LABEL org.opencontainers.image.title="local-pv-provisioner" \
      org.opencontainers.image.description="PersistentVolumes from a Kubernetes node's whole block devices"
COPY bin/image/local-pv-provisioner/${TARGETARCH}/ /
COPY bin/linux_${TARGETARCH}/local-pv-provisioner /local-pv-provisioner
ENTRYPOINT ["/local-pv-provisioner"]

FROM base AS pool-mounter
ARG TARGETARCH
LABEL org.opencontainers.image.title="pool-mounter" \
      org.opencontainers.image.description="Keeps the PersistentVolumeClaim of a storage pool mounted on a Kubernetes node"
COPY bin/image/pool-mounter/${TARGETARCH}/ /
COPY bin/linux_${TARGETARCH}/pool-mounter /pool-mounter
ENTRYPOINT ["/pool-mounter"]

FROM base AS hostpath-provisioner-operator
ARG TARGETARCH
LABEL org.opencontainers.image.title="hostpath-provisioner-operator" \
      org.opencontainers.image.description="Deploys the storage of a Kubernetes node's own pools, as a HostPathProvisioner object says"
COPY bin/image/hostpath-provisioner-operator/${TARGETARCH}/ /
COPY bin/linux_${TARGETARCH}/hostpath-provisioner-operator /hostpath-provisioner-operator
# It speaks to the API server and touches nothing else.
USER 65534:65534
ENTRYPOINT ["/hostpath-provisioner-operator"]
