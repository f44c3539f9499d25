"""The rollout queue of --rollout-data-transport straw: several rollout hosts generate for one trainer.

    rollout manager                         shared folder                        rollout host (vime rollout)
    draws a group  --- task ------------->  prompts, one file per writer  ----->  leases the task, and generates
    snapshot's rules  <-- newest tokens --  partial groups                <-----  saves tokens, renews the lease
    filters, batch  <----- answer --------  ready groups                  <-----  answers

The package straw (straw-queue) stores the groups and the leases. The manager owns the queue, and works on it
as a host, too. Every other process reaches it through two small files (`mailbox`), so the shared folder is the only
connection between hosts. The stream (`slime.rollout.stream`) decides about every group, as without a queue.
"""
