{{/* option is the value that an object or a container needs: empty for what is always there, "never" for what is made of the values. */}}
{{- define "driver.option" -}}
{{- $options := dict
  "SecurityContextConstraints/hostpath-csi-driver" "openshift" "Role/hostpath-csi-scc" "openshift" "RoleBinding/hostpath-csi-scc" "openshift"
  "ClusterRole/hostpath-csi-snapshotter" "snapshots" "ClusterRoleBinding/hostpath-csi-snapshotter" "snapshots"
  "ClusterRole/hostpath-csi-provisioner-snapshots" "snapshots" "ClusterRoleBinding/hostpath-csi-provisioner-snapshots" "snapshots"
  "ClusterRole/hostpath-csi-health-monitor" "healthMonitor" "ClusterRoleBinding/hostpath-csi-health-monitor" "healthMonitor"
  "container/csi-snapshotter" "snapshots" "container/freezer" "freeze" "volume/cgroups" "freeze" "container/health-monitor" "healthMonitor"
  "volume/pool-local" "never" "volumeMount/pool-local" "never"
-}}
{{- if has .kind (list "StorageClass" "VolumeSnapshotClass" "ConfigMap") -}}never{{- else -}}{{- get $options (printf "%s/%s" .kind .name) -}}{{- end -}}
{{- end -}}

{{/* wanted is empty for what the values leave out. */}}
{{- define "driver.wanted" -}}
{{- $v := .root.Values -}}
{{- $on := dict "openshift" $v.openshift "snapshots" $v.snapshots.enabled "freeze" (and $v.snapshots.enabled $v.snapshots.freeze) "healthMonitor" $v.healthMonitor "never" false -}}
{{- $option := include "driver.option" . -}}
{{- if or (not $option) (get $on $option) -}}yes{{- end -}}
{{- end -}}

{{/* poolVolume is the name of the volume of a pool: names of pools may have characters that those of volumes may not. */}}
{{- define "driver.poolVolume" -}}
{{- if regexMatch "^[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?$" .pool.name -}}pool-{{ .pool.name }}{{- else -}}numbered-{{ .index }}{{- end -}}
{{- end -}}

{{/* pools is the value of DATADIR, in which kubelet expands variables. The driver would refuse on each node what fails here. */}}
{{- define "driver.pools" -}}
{{- range $i, $a := .Values.pools -}}
{{- range $j, $b := $.Values.pools -}}
  {{- if and (lt $i $j) (eq $a.name $b.name) -}}{{- fail (printf "two pools are named %q" $a.name) -}}{{- end -}}
  {{- if and (ne $i $j) (hasPrefix (printf "%s/" $a.path) (printf "%s/" $b.path)) -}}{{- fail (printf "the path of pool %q is in that of pool %q" $b.name $a.name) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson .Values.pools | replace "$" "$$" -}}
{{- end -}}

{{/*
daemonset sets what the values name in the DaemonSet. The pools are in it, as the paths that are mounted for them are: they change and are
rolled back together, on one node after another. A ConfigMap would change at once, for containers of before too.
*/}}
{{- define "driver.daemonset" -}}
{{- $root := .root -}}
{{- $spec := .object.spec.template.spec -}}
{{- range $kind, $key := dict "container" "containers" "volume" "volumes" -}}
  {{- $kept := list -}}
  {{- range $one := get $spec $key -}}
    {{- if include "driver.wanted" (dict "root" $root "kind" $kind "name" $one.name) -}}{{- $kept = append $kept $one -}}{{- end -}}
  {{- end -}}
  {{- $_ := set $spec $key $kept -}}
{{- end -}}
{{- $driver := first $spec.containers -}}
{{- $mounts := list -}}
{{- range $mount := $driver.volumeMounts -}}
  {{- if include "driver.wanted" (dict "root" $root "kind" "volumeMount" "name" $mount.name) -}}{{- $mounts = append $mounts $mount -}}{{- end -}}
{{- end -}}
{{- $volumes := $spec.volumes -}}
{{- range $index, $pool := $root.Values.pools -}}
  {{- $name := include "driver.poolVolume" (dict "pool" $pool "index" $index) -}}
  {{- $paths := dict $name $pool.path -}}
  {{- if and $pool.snapshotPath (not (hasPrefix (printf "%s/" $pool.path) $pool.snapshotPath)) -}}{{- $_ := set $paths (printf "snapshots-%d" $index) $pool.snapshotPath -}}{{- end -}}
  {{- range $volume, $path := $paths -}}
    {{- $mounts = append $mounts (dict "name" $volume "mountPath" $path "mountPropagation" "HostToContainer") -}}
    {{- $volumes = append $volumes (dict "name" $volume "hostPath" (dict "path" $path "type" "DirectoryOrCreate")) -}}
  {{- end -}}
{{- end -}}
{{- $_ := set $driver "volumeMounts" $mounts -}}
{{- $_ := set $spec "volumes" $volumes -}}
{{- include "common.pod" . -}}
{{- $_ := set $driver "args" (concat $driver.args $root.Values.extraArgs) -}}
{{- range $e := $driver.env -}}
  {{- if eq $e.name "DATADIR" -}}{{- $_ := set (unset $e "valueFrom") "value" (include "driver.pools" $root) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* image is that of the driver's container. */}}
{{- define "driver.image" -}}
{{- $root := . -}}
{{- range $object := (include "common.objects" (dict "root" $root "file" "files/driver.yaml") | fromYaml).objects -}}
  {{- if eq $object.kind "DaemonSet" -}}
    {{- with first $object.spec.template.spec.containers -}}{{- include "common.image" (dict "root" $root "name" .name "image" .image) -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* policy names the shared pools to the policy for the rights of a node. */}}
{{- define "driver.policy" -}}
{{- $shared := list -}}
{{- range $pool := .root.Values.pools -}}{{- if $pool.shared -}}{{- $shared = append $shared $pool.name -}}{{- end -}}{{- end -}}
{{- range $variable := .object.spec.variables -}}
  {{- if eq $variable.name "sharedPools" -}}{{- $_ := set $variable "expression" (toJson $shared) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* classes fails for two of one name, and for two that are the default. */}}
{{- define "driver.classes" -}}
{{- $kind := .kind -}}
{{- $names := dict -}}
{{- $default := "" -}}
{{- range .classes -}}
  {{- if hasKey $names .name -}}{{- fail (printf "two %ses are named %s" $kind .name) -}}{{- end -}}
  {{- $_ := set $names .name true -}}
  {{- if and .default $default -}}{{- fail (printf "one %s can be the default: %s or %s" $kind $default .name) -}}{{- end -}}
  {{- if .default -}}{{- $default = .name -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* testClass is the class of helm test: the first whose volumes go with their claims, or none. */}}
{{- define "driver.testClass" -}}
{{- $found := "" -}}
{{- range .Values.storageClasses -}}
  {{- if and (not $found) (ne .reclaimPolicy "Retain") -}}{{- $found = .name -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}
