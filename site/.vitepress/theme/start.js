// What the start page says, beside the demo and the dashboard.
export const features = [
  {
    title: 'Sizes that hold',
    details: 'Quotas of XFS, ext4 and btrfs keep a volume within its claim. It grows while a pod uses it.',
    link: '/docs/quotas', linkText: 'Quotas'
  },
  {
    title: 'Pods go where there is room',
    details: 'The capacity that the scheduler sees counts what was promised, not what happens to be written.',
    link: '/docs/capacity', linkText: 'Capacity'
  },
  {
    title: 'Snapshots, restores and clones',
    details: 'They share blocks where the filesystem can, and say whether the source held still.',
    link: '/docs/snapshots', linkText: 'Snapshots'
  },
  {
    title: 'Disks of virtual machines',
    details: 'A claim with volumeMode: Block is a loop device on a file of the pool. It grows while the machine runs.',
    link: '/docs/kubevirt', linkText: 'Virtual machines'
  },
  {
    title: 'It says what is wrong',
    details: 'kubectl hostpath shows the pools and volumes of all nodes, and what is abnormal about them.',
    link: '/docs/troubleshooting', linkText: 'Troubleshooting'
  },
  {
    title: 'In place of what you have',
    details: 'It takes over volumes of KubeVirt’s driver and operator, and of the provisioner before CSI, without copying.',
    link: '/docs/migration', linkText: 'Migration'
  }
]

export const suited = [
  'PostgreSQL, etcd, Kafka or MinIO that replicates itself',
  'disks of KubeVirt’s virtual machines',
  'caches, build and test clusters',
  'a cluster of one node'
]

export const unsuited = [
  'data that must survive its node and is nowhere else',
  'a virtual machine that must migrate live'
]
